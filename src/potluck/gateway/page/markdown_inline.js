// Markdown inside a line: emphasis, code, links, breaks. Parses to nodes of plain data in linear time; draws nothing.

const MAX_DEPTH = 6;
const ESCAPABLE = /[\\`*_{}[\]()#+\-.!|~<>]/;
const SAFE_URL = /^(https?:\/\/|mailto:)[^\s]+$/i;
const BARE_URL = /^https?:\/\/[^\s<>"'`|]+/;
const WORD = /[\p{L}\p{N}]/u;

/** Nodes: {type: text|code|strong|em|strike|link|break, …}; `children` where it contains others. */
export function parseInline(source, depth = 0) {
  return new InlineScanner(source, depth).run();
}

/** A link only where it leads to the web or to a mailbox; anything else (javascript:, data:, file:) stays text. */
export function isSafeUrl(url) {
  return SAFE_URL.test(url);
}

class InlineScanner {
  #source;
  #depth;
  #at = 0;
  #text = "";
  #nodes = [];
  #hopeless = new Set(); // delimiters that have no closing further on; keeps hostile input linear

  constructor(source, depth) {
    this.#source = source;
    this.#depth = depth;
  }

  run() {
    while (this.#at < this.#source.length) {
      if (!this.#special(this.#source[this.#at])) this.#text += this.#source[this.#at++];
    }
    this.#flush();
    return this.#nodes;
  }

  /** Handles what starts here, if anything does. */
  #special(character) {
    switch (character) {
      case "\\": return this.#escape();
      case "\n": return this.#break();
      case "`": return this.#code();
      case "*": return this.#delimited("**", "strong") || this.#delimited("*", "em");
      case "_": return this.#delimited("__", "strong") || this.#delimited("_", "em");
      case "~": return this.#delimited("~~", "strike");
      case "!": return this.#source[this.#at + 1] === "[" && this.#link(1);
      case "[": return this.#link(0);
      case "<": return this.#angleLink();
      case "h": return this.#bareUrl();
      default: return false;
    }
  }

  #flush() {
    if (this.#text) this.#nodes.push({ type: "text", text: this.#text });
    this.#text = "";
  }

  #push(node, end) {
    this.#flush();
    this.#nodes.push(node);
    this.#at = end;
    return true;
  }

  #escape() {
    const next = this.#source[this.#at + 1];
    if (next === "\n") return this.#push({ type: "break" }, this.#at + 2);
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    this.#text += next;
    this.#at += 2;
    return true;
  }

  #break() {
    this.#text = this.#text.replace(/ +$/, "");
    return this.#push({ type: "break" }, this.#at + 1);
  }

  #code() {
    const ticks = /^`+/.exec(this.#source.slice(this.#at, this.#at + 8))[0];
    const start = this.#at + ticks.length;
    const end = this.#find(ticks, start);
    if (end < 0) return false;
    const text = this.#source.slice(start, end).replace(/\n/g, " ").replace(/^ (.*[^ ].*) $/, "$1");
    return this.#push({ type: "code", text }, end + ticks.length);
  }

  #delimited(mark, type) {
    const start = this.#at + mark.length;
    if (this.#depth >= MAX_DEPTH || !this.#source.startsWith(mark, this.#at) || !this.#opens(mark, start)) return false;
    let end = this.#find(mark, start);
    while (end >= 0 && !this.#closes(mark, end)) end = this.#find(mark, end + mark.length);
    if (end <= start) {
      if (end < 0) this.#hopeless.add(mark);
      return false;
    }
    const children = parseInline(this.#source.slice(start, end), this.#depth + 1);
    return this.#push({ type, children }, end + mark.length);
  }

  /** `snake_case` and `2 * 3` are no emphasis. */
  #opens(mark, start) {
    const after = this.#source[start];
    const before = this.#source[this.#at - 1] ?? " ";
    return after !== undefined && !/\s/.test(after) && !(mark[0] === "_" && WORD.test(before));
  }

  #closes(mark, end) {
    const before = this.#source[end - 1];
    const after = this.#source[end + mark.length] ?? " ";
    if (/\s/.test(before)) return false;
    if (mark.length === 1 && (after === mark || before === mark)) return false;
    return !(mark[0] === "_" && WORD.test(after));
  }

  #find(mark, from) {
    if (this.#hopeless.has(mark)) return -1;
    const found = this.#source.indexOf(mark, from);
    if (found < 0) this.#hopeless.add(mark);
    return found;
  }

  /** `[text](url)`; an image becomes a link, because the page loads nothing from elsewhere. */
  #link(offset) {
    const open = this.#at + offset;
    const middle = this.#find("](", open);
    if (middle < 0 || this.#depth >= MAX_DEPTH) return false;
    const end = closingParenthesis(this.#source, middle + 2);
    const label = this.#source.slice(open + 1, middle);
    if (end < 0 || label.includes("\n\n") || label.includes("[")) return false;
    const url = this.#source.slice(middle + 2, end).trim().replace(/\s+["'(].*$/, "").replace(/^<(.*)>$/, "$1");
    const children = parseInline(label || url, this.#depth + 1);
    if (isSafeUrl(url)) return this.#push({ type: "link", url, children: withoutLinks(children) }, end + 1);
    this.#flush();
    this.#nodes.push(...children);
    this.#at = end + 1;
    return true;
  }

  #angleLink() {
    const end = this.#source.slice(this.#at, this.#at + 500).indexOf(">");
    const url = end < 0 ? "" : this.#source.slice(this.#at + 1, this.#at + end);
    if (!isSafeUrl(url)) return false;
    return this.#push({ type: "link", url, children: [{ type: "text", text: url }] }, this.#at + end + 1);
  }

  #bareUrl() {
    if (WORD.test(this.#source[this.#at - 1] ?? " ")) return false;
    const match = BARE_URL.exec(this.#source.slice(this.#at, this.#at + 2000));
    if (!match) return false;
    const url = match[0].replace(/[.,;:!?*_~\])]+$/, "");
    return isSafeUrl(url) && this.#push({ type: "link", url, children: [{ type: "text", text: url }] }, this.#at + url.length);
  }
}

function closingParenthesis(source, from) {
  let depth = 0;
  for (let at = from; at < source.length && at < from + 2000; at++) {
    if (source[at] === "\n") return -1;
    if (source[at] === "(") depth++;
    if (source[at] === ")" && depth-- === 0) return at;
  }
  return -1;
}

function withoutLinks(nodes) {
  return nodes.flatMap((node) => {
    if (node.type === "link") return withoutLinks(node.children);
    return node.children ? [{ ...node, children: withoutLinks(node.children) }] : [node];
  });
}
