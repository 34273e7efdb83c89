// Figures and names as people read them. Pure.

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? Math.round(value) : value >= 10 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export function rate(tokensPerSecond) {
  return tokensPerSecond >= 100 ? String(Math.round(tokensPerSecond)) : tokensPerSecond.toFixed(1);
}

export function ago(seconds) {
  if (seconds < 3) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** `8–14`, or `7` where it is one layer; an end of the model alone has none. */
export function layers(first, last) {
  if (last < first) return first === 0 ? "embedding" : "output";
  return first === last ? String(first) : `${first}–${last}`;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** A node's name; the start of its id where it has none, or is not known here. `id` may be the start of an id. */
export function nodeName(state, id) {
  const node = state?.nodes.find((candidate) => candidate.id === id || (id.length >= 8 && candidate.id.startsWith(id)));
  return node?.name || id.slice(0, 8);
}

/** A stage as the node's diagnostics name it, `1f2e3d4c:8-14`, in words. */
export function stageName(state, stage) {
  const [id, range] = stage.split(":");
  if (!range) return nodeName(state, id);
  return `layers ${range.replace("-", "–")} on ${nodeName(state, id)}`;
}
