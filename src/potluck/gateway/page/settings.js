// What the person sets for answers: kept in this browser, read from and shown in the settings form.

const STORE_KEY = "potluck.settings";
const DEFAULTS = { temperature: 0.7, topP: null, maxTokens: 512, seed: null, system: "" };
const FIELDS = { temperature: [0, 2], topP: [0, 1], maxTokens: [1, 1_000_000], seed: [0, 2 ** 53 - 1] };

export class Settings {
  #values = { ...DEFAULTS, ...read() };

  get values() {
    return this.#values;
  }

  bind(form) {
    this.#show(form);
    form.addEventListener("input", () => this.#take(form));
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.#values = { ...DEFAULTS };
      this.#keep();
      this.#show(form);
    });
  }

  #show(form) {
    for (const name of Object.keys(DEFAULTS)) form.elements[name].value = this.#values[name] ?? "";
  }

  #take(form) {
    for (const name of Object.keys(FIELDS)) {
      const field = form.elements[name];
      if (field.validity.valid) this.#values[name] = field.value === "" ? null : Number(field.value);
    }
    this.#values.system = form.elements.system.value;
    this.#keep();
  }

  #keep() {
    try {
      localStorage.setItem(STORE_KEY, JSON.stringify(this.#values));
    } catch {
      // no room: the settings hold while the page is open
    }
  }
}

function read() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORE_KEY) ?? "{}");
    return Object.fromEntries(Object.entries(stored ?? {}).filter(isUsable));
  } catch {
    return {};
  }
}

function isUsable([name, value]) {
  if (name === "system") return typeof value === "string";
  const range = FIELDS[name];
  return range !== undefined && (value === null || (typeof value === "number" && value >= range[0] && value <= range[1]));
}
