// One card per machine: memory, version, what it serves, how busy it is, when it was last heard.

import { element, paint, reconcile } from "./dom.js";
import { ago, bytes, layers, milliseconds } from "./words.js";

const MAX_CARDS = 60; // a large swarm has its count in the heading; the lost come last
const MEMORY = [["model", "model_bytes"], ["kv", "kv_bytes"], ["free", "free_bytes"]];
const MEMORY_WORDS = { model: "model", kv: "KV cache", free: "free" };

export function renderNodes(container, state) {
  const ownVersion = state.nodes.find((node) => node.is_self)?.version;
  const shown = [...state.nodes].sort((one, other) => Number(one.state === "lost") - Number(other.state === "lost")).slice(0, MAX_CARDS);
  reconcile(container, shown, (node) => node.id, create, (card, node) => {
    card.className = `node-card ${node.state}`;
    card.dataset.state = node.state;
    paint(card, { ...node, last_seen_s: Math.round(node.last_seen_s), isOld: node.version !== ownVersion }, draw);
  });
}

function create(node) {
  return element("li", { data: { testid: "node-card", node: node.id } });
}

function draw(node) {
  return [drawHead(node), drawMemory(node.memory), ...(node.state === "lost" ? [] : node.shards.map(drawShard)), drawFoot(node)];
}

function drawHead(node) {
  const tags = [node.is_self ? "you" : null, node.trust === "member" ? null : node.trust, node.state === "online" ? null : node.state];
  return element("div", { class: "node-head" },
    element("span", { class: `dot ${node.state}`, role: "img", "aria-label": node.state }),
    element("h3", { text: node.name, title: node.id }),
    ...tags.filter(Boolean).map((tag) => element("span", { class: "tag", text: tag })),
    element("span", { class: "rtt", text: node.is_self ? "" : milliseconds(node.rtt_ms), title: "round trip" }));
}

function drawMemory(memory) {
  const whole = Math.max(memory.total_bytes, memory.model_bytes + memory.kv_bytes + memory.free_bytes, 1);
  const words = MEMORY.map(([name, field]) => `${bytes(memory[field])} ${MEMORY_WORDS[name]}`).join(", ");
  const parts = MEMORY.map(([name, field]) => element("span", { class: `part mem-${name}`, style: { width: `${(100 * memory[field]) / whole}%` } }));
  return element("div", { class: "memory" },
    element("div", { class: "bar", role: "img", "aria-label": `memory: ${words}`, title: words }, ...parts),
    element("div", { class: "memory-words" }, ...MEMORY.map(([name, field]) => element("span", { class: `key mem-${name}`, text: `${MEMORY_WORDS[name]} ${bytes(memory[field])}` }))));
}

const STATES = { loadable: "asleep, loads when asked", draining: "handing over" };

function drawShard(shard) {
  const load = shard.state === "serving" || shard.state === "spare"
    ? ` · ${shard.sessions}/${shard.max_sessions} sessions · queue ${shard.queue_depth} · ${milliseconds(shard.step_ms)} a step` : "";
  return element("div", { class: "node-shard" },
    element("span", { class: `chip ${shard.state}`, text: layers(shard.first, shard.last) }),
    element("span", { class: "faint", text: `${shard.model} · ${STATES[shard.state] ?? shard.state}${load}` }));
}

function drawFoot(node) {
  return element("div", { class: "node-foot" },
    element("span", { text: node.address }),
    element("span", { class: node.isOld ? "old" : "", text: `v${node.version}`, title: node.isOld ? "another version than this node's" : "" }),
    element("span", { text: node.is_self ? "this node" : `seen ${ago(node.last_seen_s)}` }));
}
