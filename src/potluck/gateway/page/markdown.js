// Draws Markdown while it streams. Blocks that have not changed keep their elements, so nothing jumps and a selection survives.

import { copyText, element } from "./dom.js";
import { icon } from "./icons.js";
import { parseBlocks } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

const drawn = new WeakMap(); // element → the block it shows

/** Makes `container` show `text`. */
export function renderMarkdown(container, text) {
  const blocks = parseBlocks(text);
  blocks.forEach((block, index) => {
    const old = container.children[index];
    if (old && isSame(drawn.get(old), block)) return;
    if (old && updateInPlace(old, block)) return;
    const fresh = drawBlock(block);
    drawn.set(fresh, block);
    if (old) old.replaceWith(fresh);
    else container.append(fresh);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function isSame(old, block) {
  return old !== undefined && old.type === block.type && old.source === block.source;
}

/** Code that grows keeps its box, its scroll position and its button. */
function updateInPlace(node, block) {
  const old = drawn.get(node);
  if (block.type !== "code" || old?.type !== "code" || old.language !== block.language) return false;
  node.querySelector("code").textContent = block.text;
  drawn.set(node, block);
  return true;
}

function drawBlock(block) {
  switch (block.type) {
    case "code": return drawCode(block);
    case "heading": return element(`h${Math.min(block.level + 2, 6)}`, {}, ...drawInline(block.text));
    case "rule": return element("hr");
    case "quote": return element("blockquote", {}, ...block.blocks.map(drawBlock));
    case "list": return drawList(block);
    case "table": return drawTable(block);
    default: return element("p", {}, ...drawInline(block.text));
  }
}

function drawCode(block) {
  const code = element("code", { text: block.text });
  const pre = element("pre", { tabindex: "0" }, code);
  const copy = element("button", { type: "button", class: "quiet small", "aria-label": "Copy code", on: { click: () => copyText(code.textContent, copy) } },
    icon("copy"), element("span", { class: "label", text: "Copy" }));
  const bar = element("div", { class: "code-bar" }, element("span", { text: block.language || "text" }), copy);
  return element("div", { class: "code-block" }, bar, pre);
}

function drawList(block) {
  const isTight = block.items.every((item) => item.blocks.filter((inner) => inner.type === "paragraph").length <= 1);
  const items = block.items.map((item) => drawItem(item, isTight));
  return element(block.isOrdered ? "ol" : "ul", { start: block.isOrdered && block.start !== 1 ? block.start : null }, ...items);
}

function drawItem(item, isTight) {
  const content = item.blocks.flatMap((block) => (isTight && block.type === "paragraph" ? drawInline(block.text) : [drawBlock(block)]));
  if (item.isDone === null) return element("li", {}, ...content);
  const box = element("input", { type: "checkbox", disabled: true, checked: item.isDone, "aria-label": item.isDone ? "done" : "to do" });
  return element("li", { class: "task" }, box, ...content);
}

function drawTable(block) {
  const cell = (tag) => (text, index) => element(tag, { class: `align-${block.aligns[index] ?? "left"}` }, ...drawInline(text));
  const head = element("thead", {}, element("tr", {}, ...block.header.map(cell("th"))));
  const body = element("tbody", {}, ...block.rows.map((row) => element("tr", {}, ...row.map(cell("td")))));
  return element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Table" }, element("table", {}, head, body));
}

/** Nodes for one line of Markdown. */
export function drawInline(text) {
  return parseInline(text).map(drawNode);
}

const TAGS = { strong: "strong", em: "em", strike: "s" };

function drawNode(node) {
  switch (node.type) {
    case "text": return document.createTextNode(node.text);
    case "break": return element("br");
    case "code": return element("code", { text: node.text });
    case "link": return drawLink(node);
    default: return element(TAGS[node.type], {}, ...node.children.map(drawNode));
  }
}

function drawLink(node) {
  const attributes = { href: node.url, target: "_blank", rel: "noopener noreferrer nofollow", title: node.url };
  return element("a", attributes, ...node.children.map(drawNode));
}
