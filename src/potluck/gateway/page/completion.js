// One streamed answer from /v1/chat/completions: text, diagnostics and the final usage. Draws nothing.

import { ApiError } from "./api.js";

const DIAGNOSTICS = new Set(["shard_status", "shard_failover", "pipeline_aborted"]);

/** The request body for these messages and settings; settings that are empty are left to the node. */
export function requestBody(model, messages, settings, seed) {
  const system = settings.system.trim();
  const spoken = messages.filter(({ content }) => content !== "").map(({ role, content }) => ({ role, content }));
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...spoken],
    seed,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  return body;
}

/**
 * Streams one answer. `listener` may have onId(id), onText(delta) and onDiagnostic(name, frame).
 * Returns {finishReason, usage}; throws ApiError where the node gives up, and the abort's reason where `signal` aborts.
 */
export async function complete(api, body, signal, listener) {
  const outcome = { finishReason: null, usage: null };
  const options = { body, signal, headers: { "X-Potluck-Diagnostics": "events" } };
  for await (const { event, data } of api.events("/v1/chat/completions", options)) {
    if (data === "[DONE]") return outcome;
    const frame = JSON.parse(data);
    if (DIAGNOSTICS.has(event)) listener.onDiagnostic?.(event, frame);
    else takeChunk(frame, outcome, listener);
  }
  throw new ApiError("The connection broke off before the answer was complete.", { code: "stream_ended" });
}

function takeChunk(frame, outcome, listener) {
  if (frame.error) throw new ApiError(frame.error.message, { code: frame.error.code ?? "" });
  if (frame.id) listener.onId?.(frame.id);
  if (frame.usage) outcome.usage = frame.usage;
  const choice = frame.choices?.[0];
  if (!choice) return;
  if (choice.finish_reason) outcome.finishReason = choice.finish_reason;
  const text = choice.delta?.content;
  if (text) listener.onText?.(text);
}

export function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}
