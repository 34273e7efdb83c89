// The dialogs: inviting somebody, connecting a client, giving the API key. Native dialogs, so focus and Escape are the browser's.

import { NO_KEY, clientSettings } from "./clients.js";
import { byId, copyText, element } from "./dom.js";

export function bindDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const close of dialog.querySelectorAll("[data-close]")) close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (isOutside(dialog, event)) dialog.close(); });
  }
}

function isOutside(dialog, event) {
  if (event.target !== dialog) return false;
  const box = dialog.getBoundingClientRect();
  return event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom;
}

/** Asks for the API key; null where the person closes the dialog. */
export function askForKey(wasRejected) {
  const dialog = byId("key-dialog");
  const form = byId("key-form");
  byId("key-trouble").hidden = !wasRejected;
  form.reset();
  dialog.showModal();
  return new Promise((resolve) => {
    let key = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      key = form.elements.key.value.trim() || null;
      dialog.close();
    };
    dialog.addEventListener("close", () => resolve(key), { once: true });
  });
}

export function bindInvite(api) {
  const dialog = byId("invite-dialog");
  const form = byId("invite-form");
  const result = byId("invite-result");
  byId("invite-open").addEventListener("click", () => {
    result.hidden = true;
    dialog.showModal();
  });
  byId("invite-copy").addEventListener("click", () => copyText(byId("invite-command").textContent, byId("invite-copy")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await showInvite(api, form, result);
  });
}

async function showInvite(api, form, result) {
  const trouble = byId("invite-trouble");
  trouble.hidden = true;
  try {
    const wanted = { trust: form.elements.trust.value, expires_s: Number(form.elements.expires.value), uses: Number(form.elements.uses.value) };
    const { command } = await api.json("/potluck/invite", wanted);
    byId("invite-command").textContent = command;
    result.hidden = false;
    byId("invite-copy").focus();
  } catch (error) {
    trouble.textContent = error.message;
    trouble.hidden = false;
  }
}

/** `current()` gives {state, model}. */
export function bindClients(api, current) {
  const dialog = byId("clients-dialog");
  const choice = byId("client-choice");
  const withKey = byId("client-with-key");
  const show = () => {
    const { state, model } = current();
    fillClients(choice, settingsFor(api, state, model, withKey.checked));
    byId("client-url").textContent = baseUrl();
    byId("client-key-words").textContent = state?.api.needs_key ? "This node wants its API key." : "No key is needed on this machine.";
    byId("client-key-row").hidden = !state?.api.needs_key || !api.key;
  };
  byId("clients-open").addEventListener("click", () => { show(); dialog.showModal(); });
  choice.addEventListener("change", show);
  withKey.addEventListener("change", show);
  byId("client-copy").addEventListener("click", () => copyText(byId("client-text").textContent, byId("client-copy")));
  byId("client-url-copy").addEventListener("click", () => copyText(byId("client-url").textContent, byId("client-url-copy")));
}

function settingsFor(api, state, model, isKeyShown) {
  const key = state?.api.needs_key ? (isKeyShown && api.key ? api.key : "YOUR-API-KEY") : NO_KEY;
  return clientSettings(baseUrl(), key, model?.id ?? "MODEL");
}

/** As this browser reaches the node: on a phone the node's own word for itself would be the phone. */
function baseUrl() {
  return `${location.origin}/v1`;
}

function fillClients(choice, settings) {
  if (choice.options.length === 0) choice.append(...settings.map(({ name }) => element("option", { text: name, value: name })));
  const chosen = settings.find(({ name }) => name === choice.value) ?? settings[0];
  byId("client-note").textContent = chosen.note;
  byId("client-text").textContent = chosen.text;
}
