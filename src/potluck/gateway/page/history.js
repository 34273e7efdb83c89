// The list of conversations, in the side column and (on small screens) in its drawer.

import { element, reconcile } from "./dom.js";
import { icon } from "./icons.js";

/** `actions` has open(id) and remove(id). */
export function renderHistory(list, conversations, currentId, actions) {
  reconcile(list, conversations.all, (conversation) => conversation.id, (conversation) => createRow(conversation.id, actions), (row, conversation) => {
    const open = row.querySelector(".history-open");
    open.textContent = conversation.title;
    open.title = conversation.title;
    open.setAttribute("aria-current", conversation.id === currentId ? "true" : "false");
    row.querySelector(".history-remove").setAttribute("aria-label", `Delete “${conversation.title}”`);
  });
}

function createRow(id, actions) {
  return element("li", { data: { testid: "conversation" } },
    element("button", { type: "button", class: "history-open", on: { click: () => actions.open(id) } }),
    element("button", { type: "button", class: "quiet small history-remove", on: { click: () => actions.remove(id) } }, icon("bin")));
}
