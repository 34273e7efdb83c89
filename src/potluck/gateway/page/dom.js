// Making and updating elements. Text only ever becomes a text node; there is no way in here from a string to markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties (`class`, `text`, `on`, `data`, attributes) and children; null children are left out. */
export function element(tag, properties = {}, ...children) {
  return dress(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), properties, children);
}

function dress(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") for (const [key, style] of Object.entries(value)) node.style.setProperty(key, style);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const painted = new WeakMap();

/** Rebuilds what is in `node` from `data`, but only when `data` differs from the last time: focus and selection stay otherwise. */
export function paint(node, data, build) {
  const signature = JSON.stringify(data);
  if (painted.get(node) === signature) return;
  painted.set(node, signature);
  node.replaceChildren(...[build(data)].flat().filter((child) => child !== null && child !== undefined));
}

/** Keeps one child of `container` per item, in order, by key. `create` makes it, `update` fills it. */
export function reconcile(container, items, keyOf, create, update) {
  const existing = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let cursor = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = existing.get(key) ?? create(item);
    existing.delete(key);
    child.dataset.key = key;
    update(child, item);
    if (child === cursor) cursor = cursor.nextElementSibling;
    else container.insertBefore(child, cursor);
  }
  for (const leftover of existing.values()) leftover.remove();
}

export function byId(id) {
  return document.getElementById(id);
}

/** Copies and says so on the button for a moment; without clipboard access (plain http on a network) it selects a copy instead. */
export async function copyText(text, button) {
  const done = await writeClipboard(text);
  const label = button.querySelector(".label") ?? button;
  const before = label.dataset.before ?? label.textContent;
  label.dataset.before = before;
  label.textContent = done ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { label.textContent = before; }, 1500);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const area = element("textarea", { class: "offscreen", "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
