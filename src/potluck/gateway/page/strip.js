// The strip: one column per layer, one row per node, and underneath how many can compute each layer. Gaps are what it is for.

import { element, paint } from "./dom.js";
import { layers, plural } from "./words.js";

const COUNTED = new Set(["serving", "spare"]); // able to compute now
const MAX_ROWS = 40; // whoever comes after them still counts among the copies
const STATE_WORDS = {
  serving: "serving", loading: "loading", spare: "spare, ready to step in", loadable: "asleep, loads when asked", draining: "handing over",
};

export function renderStrip(container, state, model, activeStages) {
  const rows = state.nodes
    .map((node) => ({ id: node.id, name: node.name, isSelf: node.is_self, state: node.state, shards: shardsOf(node, model) }))
    .filter((row) => row.shards.length > 0 && row.state !== "lost")
    .slice(0, MAX_ROWS);
  const active = activeStages.map(({ node, first, last }) => ({ node, first, last }));
  paint(container, { rows, active, count: model.layer_count, id: model.id, runs: coverage(state, model) }, draw);
}

function shardsOf(node, model) {
  return node.shards
    .filter((shard) => shard.model === model.id)
    .map(({ first, last, state, has_embedding, has_output }) => ({ first, last, state, has_embedding, has_output }));
}

/** Runs of layers that equally many reachable nodes can compute: [{first, last, count, isAsleep}]; asleep: nobody now, somebody when asked. */
export function coverage(state, model) {
  const counts = copies(state, model, (shard) => COUNTED.has(shard.state));
  const sleeping = copies(state, model, (shard) => shard.state === "loadable");
  const runs = [];
  counts.forEach((count, layer) => {
    const isAsleep = count === 0 && sleeping[layer] > 0;
    const previous = runs.at(-1);
    if (previous?.count === count && previous.isAsleep === isAsleep) previous.last = layer;
    else runs.push({ first: layer, last: layer, count, isAsleep });
  });
  return runs;
}

/** For each layer, how many reachable nodes have a shard of this kind with it. */
function copies(state, model, isOfKind) {
  const counts = new Array(model.layer_count).fill(0);
  for (const node of state.nodes) {
    if (node.state === "lost") continue;
    const held = node.shards.filter((shard) => shard.model === model.id && isOfKind(shard));
    for (let layer = 0; layer < counts.length; layer++) {
      if (held.some((shard) => shard.first <= layer && layer <= shard.last)) counts[layer]++;
    }
  }
  return counts;
}

function draw({ rows, active, count, runs }) {
  const body = rows.map((row) => drawRow(row, active.filter((stage) => stage.node === row.id), count));
  return [drawScale(count), ...body, drawCoverage(runs, count)];
}

function track(count, ...children) {
  return element("div", { class: "track", style: { "--layers": String(count) } }, ...children);
}

function place(first, last, count) {
  return { left: `${(100 * first) / count}%`, width: `${(100 * (last - first + 1)) / count}%` };
}

function drawScale(count) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100].find((candidate) => count / candidate <= 8) ?? Math.ceil(count / 8);
  const marks = [];
  for (let layer = 0; layer < count; layer += step) {
    marks.push(element("span", { class: "mark", text: String(layer), style: { left: `${(100 * (layer + 0.5)) / count}%` } }));
  }
  return element("div", { class: "strip-row scale", "aria-hidden": "true" }, element("span", { class: "who", text: "layer" }), track(count, ...marks));
}

function drawRow(row, active, count) {
  const bars = row.shards.map((shard) => drawShard(shard, count));
  const running = active.map((stage) => element("span", { class: "running", style: place(stage.first, stage.last, count), "aria-hidden": "true" }));
  const who = element("span", { class: "who", title: row.name, text: row.name }, row.isSelf ? element("span", { class: "you", text: " you" }) : null);
  return element("div", { class: `strip-row node-${row.state}`, role: "listitem", data: { testid: "strip-row", node: row.id } }, who, track(count, ...bars, ...running));
}

function drawShard(shard, count) {
  const ends = [shard.has_embedding ? "embedding" : "", shard.has_output ? "output" : ""].filter(Boolean);
  const label = `layers ${layers(shard.first, shard.last)}${ends.length ? ` with ${ends.join(" and ")}` : ""}: ${STATE_WORDS[shard.state] ?? shard.state}`;
  return element("span", {
    class: `shard ${shard.state}`, role: "img", "aria-label": label, title: label, style: place(shard.first, shard.last, count),
    data: { testid: "shard", first: shard.first, last: shard.last, state: shard.state },
  }, element("span", { class: "range", text: layers(shard.first, shard.last) }));
}

function describe(run) {
  if (run.isAsleep) return ["asleep", "asleep", "asleep, somebody loads them when asked"];
  if (run.count === 0) return ["gap", "gap", "nobody has them"];
  return [run.count === 1 ? "single" : "replicated", `×${run.count}`, `on ${plural(run.count, "machine")}`];
}

function drawCoverage(runs, count) {
  const cells = runs.map((run) => {
    const [kind, shown, told] = describe(run);
    const words = `layers ${layers(run.first, run.last)}: ${told}`;
    return element("span", {
      class: `cover ${kind}`, role: "img", "aria-label": words, title: words, style: place(run.first, run.last, count),
      data: { testid: "coverage", first: run.first, last: run.last, count: run.count },
    }, element("span", { text: shown }));
  });
  return element("div", { class: "strip-row total", role: "listitem" }, element("span", { class: "who", text: "copies" }), track(count, ...cells));
}
