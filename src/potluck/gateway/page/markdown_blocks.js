// Markdown between lines: headings, paragraphs, lists, quotes, fenced code, tables, rules. Parses to plain data; draws nothing.

const MAX_DEPTH = 8;
const MAX_CELLS = 4000; // a larger table is shown as the text that it is
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^ {0,3}\|?( *:?-+:? *\|)* *:?-+:? *\|? *$/;

/** Blocks: {type, source, …}. Equal sources give equal blocks, so whoever draws them can keep what has not changed. */
export function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const block = takeBlock(lines, at, depth);
    block.source = lines.slice(at, block.end).join("\n");
    at = block.end;
    blocks.push(block);
  }
  return blocks;
}

function takeBlock(lines, at, depth) {
  return (
    takeFence(lines, at) ?? takeHeading(lines, at) ?? takeRule(lines, at) ?? takeTable(lines, at)
    ?? (depth < MAX_DEPTH ? takeQuote(lines, at, depth) ?? takeList(lines, at, depth) : null)
    ?? takeParagraph(lines, at, depth)
  );
}

function takeFence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, mark, language] = open;
  let end = at + 1;
  while (end < lines.length && !closesFence(lines[end], mark)) end++;
  const isClosed = end < lines.length;
  return { type: "code", language, text: lines.slice(at + 1, end).join("\n"), isClosed, end: isClosed ? end + 1 : end };
}

function closesFence(line, mark) {
  const trimmed = line.trim();
  return trimmed.length >= mark.length && trimmed.split(mark[0]).join("") === "";
}

function takeHeading(lines, at) {
  const match = HEADING.exec(lines[at]);
  return match && { type: "heading", level: match[1].length, text: match[2], end: at + 1 };
}

function takeRule(lines, at) {
  return RULE.test(lines[at]) ? { type: "rule", end: at + 1 } : null;
}

function takeTable(lines, at) {
  const divider = lines[at + 1];
  if (!lines[at].includes("|") || divider === undefined || divider.length > 2000) return null;
  const header = cellsOf(lines[at]);
  if (isArriving(lines, at)) return { type: "table", header, aligns: [], rows: [], end: at + 2 };
  if (!divider.includes("-") || !DIVIDER.test(divider)) return null;
  const aligns = cellsOf(divider).map(alignOf);
  if (header.length !== aligns.length) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim() !== "") end++;
  if (header.length * (end - at) > MAX_CELLS) return { type: "code", language: "", text: lines.slice(at, end).join("\n"), isClosed: true, end };
  const rows = lines.slice(at + 2, end).map((line) => rowOf(line, header.length));
  return { type: "table", header, aligns, rows, end };
}

/** A divider that is still being written: shown as a table already, so that the text does not jump when it is complete. */
function isArriving(lines, at) {
  const isLast = at + 2 === lines.length;
  return isLast && lines[at].trimStart().startsWith("|") && /^ {0,3}\|[ |:-]*$/.test(lines[at + 1]);
}

function cellsOf(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function rowOf(line, width) {
  const cells = cellsOf(line).slice(0, width);
  return [...cells, ...new Array(width - cells.length).fill("")];
}

function alignOf(cell) {
  if (cell.startsWith(":") && cell.endsWith(":")) return "center";
  return cell.endsWith(":") ? "right" : "left";
}

function takeQuote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && lines[end].trim() !== "" && (QUOTE.test(lines[end]) || !startsBlock(lines, end))) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n");
  return { type: "quote", blocks: parseBlocks(inner, depth + 1), end };
}

function takeList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || /\d/.test(match[2]) !== isOrdered || match[1].length > first[1].length + 1 || RULE.test(lines[end])) break;
    const itemEnd = endOfItem(lines, end, match);
    items.push(itemOf(lines.slice(end, itemEnd), match, depth));
    end = itemEnd;
  }
  if (items.length === 0) return null;
  return { type: "list", isOrdered, start: isOrdered ? Number.parseInt(first[2], 10) : 1, items, end };
}

/** An item goes on while lines are indented under it, or are plain continuation of its paragraph. */
function endOfItem(lines, at, match) {
  const indent = match[1].length + 2;
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (line.trim() === "") {
      let next = end;
      while (next < lines.length && lines[next].trim() === "") next++;
      if (next === lines.length) return end;
      if (indentOf(lines[next]) >= indent) end = next;
      else return ITEM.test(lines[next]) ? next : end;
    } else if (indentOf(line) < indent && (ITEM.test(line) || startsBlock(lines, end) || lines[end - 1].trim() === "")) return end;
    end++;
  }
  return end;
}

function itemOf(lines, match, depth) {
  const width = match[0].length;
  const [first, ...rest] = lines;
  let text = first.slice(width);
  const task = /^\[([ xX])\] +/.exec(text);
  if (task) text = text.slice(task[0].length);
  const inner = [text, ...rest.map((line) => line.slice(Math.min(width, indentOf(line))))].join("\n");
  return { isDone: task ? task[1] !== " " : null, blocks: parseBlocks(inner, depth + 1) };
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function takeParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !(depth < MAX_DEPTH && startsBlock(lines, end)) && !takeTable(lines, end)) end++;
  return { type: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n"), end };
}
