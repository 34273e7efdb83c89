// Our own line icons, 24 × 24, drawn with the colour of the text around them.

import { svg } from "./dom.js";

const PATHS = {
  send: "M12 19V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h10",
  tune: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  invite: "M15 19a6 6 0 0 0-12 0M9 11a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7M19 8v6M16 11h6",
  plug: "M9 3v5M15 3v5M6 8h12v3a6 6 0 0 1-12 0zM12 17v4",
  bolt: "M13 3L5 14h6l-1 7 8-11h-6z",
  down: "M12 5v14M5 12l7 7 7-7",
  joined: "M12 5v14M5 12h14",
  left: "M5 12h14M12 5l7 7-7 7",
  lost: "M6 6l12 12M18 6L6 18",
  failover: "M4 8h11a4 4 0 0 1 0 8H8M8 4L4 8l4 4",
  recovered: "M5 13l4 4L19 7",
  plan: "M5 6h14M5 12h9M5 18h5",
};

export function icon(name) {
  const path = svg("path", { d: PATHS[name] ?? PATHS.plan });
  return svg("svg", { class: name === "stop" ? "icon solid" : "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" }, path);
}
