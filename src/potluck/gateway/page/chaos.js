// The experiment behind the chaos button: a shard is killed under an answer; afterwards the same is asked undisturbed and compared.

import { element, paint } from "./dom.js";
import { icon } from "./icons.js";
import { milliseconds, nodeName, plural } from "./words.js";

/** Where two texts part, or -1. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  const shorter = Math.min(one.length, other.length);
  for (let at = 0; at < shorter; at++) if (one[at] !== other[at]) return at;
  return shorter;
}

/** What the comparison says, for the message to keep. */
export function verdictOf(disturbed, undisturbed, pauseMs) {
  const at = firstDifference(disturbed, undisturbed);
  if (at < 0) return { phase: "identical", characters: disturbed.length, pauseMs };
  return { phase: "different", at, pauseMs, disturbed: excerpt(disturbed, at), undisturbed: excerpt(undisturbed, at) };
}

function excerpt(text, at) {
  return text.slice(Math.max(0, at - 20), at + 40);
}

export function renderChaos(container, chaos, state) {
  container.hidden = !chaos;
  if (!chaos) return;
  container.dataset.verdict = chaos.phase;
  const name = chaos.node ? nodeName(state, chaos.node) : "";
  paint(container, { ...chaos, name }, () => [icon("bolt"), element("div", {}, ...words(chaos, name))]);
}

function words(chaos, name) {
  const killed = name ? `The ${chaos.what ?? "worker"} on ${name} was killed in the middle of this answer` : "Killing a shard under this answer";
  const pause = chaos.pauseMs ? `; it paused for ${milliseconds(chaos.pauseMs)}` : "";
  const line = (text, kind = "") => element("p", { class: kind, text });
  switch (chaos.phase) {
    case "killing": return [line("Killing a shard under this answer…")];
    case "killed": return [line(`${killed}${pause}${pause ? "." : " …"}`)];
    case "repeating": return [line(`${killed}${pause}.`), line(`Asking the same again, undisturbed: ${plural(chaos.same, "character")} so far.`, "faint")];
    case "identical": return [line(`Identical. ${plural(chaos.characters, "character")}, not one of them changed.`, "chaos-result"), line(`${killed}${pause}. Asked again with the same seed, undisturbed, the text is the same.`, "faint")];
    case "different": return [line(`Different from character ${chaos.at + 1} on.`, "chaos-result"), line(`${killed}${pause}.`, "faint"), quoted("disturbed", chaos.disturbed), quoted("undisturbed", chaos.undisturbed)];
    default: return [line(chaos.reason ?? "The experiment was stopped; there is nothing to compare.")];
  }
}

function quoted(label, text) {
  return element("p", { class: "faint" }, element("span", { text: `${label}: ` }), element("q", { text }));
}
