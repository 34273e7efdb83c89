// One running answer, stage by stage: where its time goes (compute, queue, wire), so that one sees which machine is slow.

import { element, paint } from "./dom.js";
import { layers, milliseconds, nodeName, plural, rate } from "./words.js";

const PARTS = ["compute", "queue", "wire"];
export const PHASES = {
  queued: "waiting for a place", prefill: "reading the prompt", decode: "writing", recovering: "recovering from a loss", finished: "finished",
};

/** The request to show: the person's own where it runs, else the first one. */
export function chooseRequest(state, ownId) {
  return state.requests.find((request) => request.id === ownId) ?? state.requests[0] ?? null;
}

export function renderPipeline(container, state, request, ownId) {
  const stages = (request?.stages ?? []).map((stage) => ({ ...stage, name: nodeName(state, stage.node) }));
  const others = state.requests.filter((other) => other.id !== request?.id).length;
  paint(container, { request, stages, others, whose: request && whoseAnswer(request, ownId) }, draw);
}

function whoseAnswer(request, ownId) {
  if (request.phase === "finished") return "the last answer";
  if (request.id === ownId) return "your answer";
  return ownId ? "somebody's answer" : "an answer"; // one's own has no id before its first piece
}

function draw({ request, stages, others, whose }) {
  if (!request) return element("p", { class: "faint", text: "No answer is being written. Ask something and watch where its time goes." });
  const slowest = Math.max(0.001, ...stages.map(total));
  return [
    drawSummary(request, stages, whose),
    element("ol", { class: "stages" }, ...stages.map((stage) => drawStage(stage, slowest))),
    drawLegend(),
    others > 0 ? element("p", { class: "faint", text: `${plural(others, "other answer")} running.` }) : null,
  ];
}

function total(stage) {
  return stage.compute_ms + stage.queue_ms + stage.wire_ms;
}

function drawSummary(request, stages, whose) {
  const round = stages.reduce((sum, stage) => sum + total(stage), 0);
  const isOver = request.phase === "finished"; // its last counts came before its last tokens; the answer itself has the right ones
  const facts = isOver ? [whose] : [whose, PHASES[request.phase] ?? request.phase];
  if (request.tokens > 0 && !isOver) facts.push(plural(request.tokens, "token"), `${rate(request.tokens_per_s)} tokens/s`);
  if (round > 0) facts.push(`${milliseconds(round)} a step`);
  if (request.failovers > 0) facts.push(plural(request.failovers, "failover"));
  return element("p", { class: "facts", data: { testid: "request-facts", phase: request.phase } }, ...facts.map((fact) => element("span", { text: fact })));
}

function drawStage(stage, slowest) {
  const parts = PARTS.map((part) => element("span", { class: `part ${part}`, style: { width: `${(100 * stage[`${part}_ms`]) / slowest}%` } }));
  const words = PARTS.map((part) => `${part} ${milliseconds(stage[`${part}_ms`])}`).join(", ");
  return element("li", { data: { testid: "stage", node: stage.node, first: stage.first, last: stage.last } },
    element("span", { class: "stage-name" }, element("b", { text: stage.name }), element("span", { class: "faint", text: ` ${layers(stage.first, stage.last)}` })),
    element("span", { class: "bar", role: "img", "aria-label": words, title: words }, ...parts),
    element("span", { class: "stage-time", text: milliseconds(total(stage)) }));
}

function drawLegend() {
  return element("p", { class: "legend" }, ...PARTS.map((part) => element("span", { class: `key ${part}`, text: part })));
}
