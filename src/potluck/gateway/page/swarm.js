// The swarm's half of the page: hands each new state to the parts that show it.

import { element, paint } from "./dom.js";
import { drawInline } from "./markdown.js";
import { renderNodes } from "./node_cards.js";
import { chooseRequest, renderPipeline } from "./pipeline.js";
import { renderStrip } from "./strip.js";
import { renderTable } from "./table.js";
import { layers, nodeName, plural, rate } from "./words.js";

export class SwarmView {
  #parts;
  #last = null; // stays in sight when it is finished: short answers are over before one has read where their time went

  /** `parts`: the elements verdict, picture, strip, stripTitle, pipeline, nodes, nodesTitle, plan. */
  constructor(parts) {
    this.#parts = parts;
  }

  render(state, model, ownId) {
    const request = chooseRequest(state, ownId);
    renderVerdict(this.#parts.verdict, model);
    renderNodes(this.#parts.nodes, state);
    renderPlan(this.#parts.plan, state);
    if (request?.stages.length > 0) this.#last = { ...request, phase: "finished" };
    renderPipeline(this.#parts.pipeline, state, request ?? this.#last, ownId);
    this.#parts.nodesTitle.textContent = plural(state.nodes.length, "machine");
    if (!model) return;
    const shown = request && request.model === model.id ? request : null;
    renderTable(this.#parts.picture, state, model, shown);
    renderStrip(this.#parts.strip, state, model, shown?.stages ?? []);
    this.#parts.stripTitle.textContent = `${model.id} · ${plural(model.layer_count, "layer")}`;
  }
}

export function renderVerdict(container, model) {
  container.dataset.answer = model ? (model.can_answer ? "yes" : "no") : "none";
  paint(container, model ?? {}, () => {
    if (!model) return element("p", { class: "verdict-line", text: "This swarm has no model yet." });
    return [
      element("p", { class: "verdict-line", data: { testid: "verdict-line" } }, element("span", { class: `dot ${model.can_answer ? "online" : "lost"}` }), element("span", { text: model.verdict })),
      model.missing.length > 0 ? element("p", { class: "missing", data: { testid: "missing" }, text: `Missing: layers ${model.missing.map((range) => range.replace("-", "–")).join(", ")}` }) : null,
      model.fix ? element("p", { class: "fix" }, ...drawInline(model.fix)) : null,
    ];
  });
}

function renderPlan(container, state) {
  container.hidden = state.plan === null;
  if (state.plan === null) return;
  const assignments = state.plan.assignments.map((assignment) => ({ ...assignment, name: nodeName(state, assignment.node) }));
  paint(container.querySelector(".plan-body"), { plan: state.plan, assignments }, () => [
    element("p", { class: "faint", text: `With this division about ${rate(state.plan.expected_tokens_per_s)} tokens/s are expected.` }),
    element("ul", { class: "plan-list" }, ...assignments.map((assignment) => element("li", {},
      element("span", { class: "chip serving", text: layers(assignment.first, assignment.last) }), element("b", { text: assignment.name }), element("span", { class: "faint", text: assignment.why })))),
  ]);
}
