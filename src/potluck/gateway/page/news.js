// What happened in the swarm, newest first: joins, losses, failovers. Bounded; an event that comes twice is shown once.

import { element } from "./dom.js";
import { icon } from "./icons.js";
import { clock } from "./words.js";

const MAX_ITEMS = 80;

export class News {
  #list;
  #empty;

  constructor(list, empty) {
    this.#list = list;
    this.#empty = empty;
  }

  add(item) {
    const key = `${item.at_ms} ${item.kind} ${item.text}`;
    if ([...this.#list.children].some((child) => child.dataset.key === key)) return;
    this.#empty.hidden = true;
    this.#list.prepend(draw(item, key));
    while (this.#list.children.length > MAX_ITEMS) this.#list.lastElementChild.remove();
  }
}

function draw(item, key) {
  return element("li", { class: `news-item ${item.kind}`, data: { testid: "news", kind: item.kind, node: item.node ?? "", key } },
    element("span", { class: "badge" }, icon(item.kind)),
    element("span", { class: "news-text", text: item.text }),
    element("time", { datetime: new Date(item.at_ms).toISOString(), text: clock(item.at_ms) }));
}
