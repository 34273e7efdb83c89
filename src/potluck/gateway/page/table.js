// The picture of the machines: everybody sits around a table, the answer travels across it. Times of hops stand on the way.

import { paint, svg } from "./dom.js";
import { PHASES } from "./pipeline.js";
import { layers, milliseconds, rate } from "./words.js";

const WIDTH = 460;
const HEIGHT = 292;
const CENTRE = { x: WIDTH / 2, y: 146 };
const SEATS = { x: 166, y: 88 };
const DISH = { x: 64, y: 33 };
const MAX_SEATS = 10;
const SEAT_RADIUS = 21;

export function renderTable(container, state, model, request) {
  const seats = chooseSeats(state, model, request);
  const data = { seats, hops: hopsOf(state, seats, request), links: linksOf(state, seats, request), centre: centreOf(request, state.plan, model), more: state.nodes.filter((node) => node.state !== "lost").length - seats.length };
  paint(container, data, draw);
}

/** This node at the bottom, the rest in the order in which the answer passes them, then whoever else is there. */
function chooseSeats(state, model, request) {
  const order = (request?.stages ?? []).map((stage) => stage.node);
  const rank = (node) => {
    if (node.is_self) return -1;
    const place = order.indexOf(node.id);
    return place >= 0 ? place : firstLayer(node, model) + 1000;
  };
  const present = state.nodes.filter((node) => node.state !== "lost");
  const chosen = present.sort((one, other) => rank(one) - rank(other)).slice(0, MAX_SEATS);
  return chosen.map((node, index) => ({ ...seatAt(index, chosen.length), ...describe(node, model), isActive: order.includes(node.id) }));
}

function firstLayer(node, model) {
  return Math.min(9999, ...node.shards.filter((shard) => shard.model === model.id).map((shard) => shard.first));
}

function describe(node, model) {
  const ranges = node.shards.filter((shard) => shard.model === model.id && shard.state !== "loadable");
  const used = node.memory.total_bytes > 0 ? (node.memory.model_bytes + node.memory.kv_bytes) / node.memory.total_bytes : 0;
  return {
    id: node.id, name: node.name, state: node.state, isSelf: node.is_self, used: Math.round(100 * Math.min(1, used)),
    holds: ranges.map((shard) => layers(shard.first, shard.last)).join(", "),
  };
}

function seatAt(index, count) {
  const angle = Math.PI / 2 + (2 * Math.PI * index) / count;
  return { x: CENTRE.x + SEATS.x * Math.cos(angle), y: CENTRE.y + SEATS.y * Math.sin(angle) };
}

function hopsOf(state, seats, request) {
  if (!request || request.stages.length === 0) return [];
  const self = seats.find((seat) => seat.isSelf);
  const stops = [{ node: self?.id, wire_ms: null }, ...request.stages, { node: self?.id, wire_ms: null }];
  return stops.slice(1).flatMap((stop, index) => {
    const from = seats.find((seat) => seat.id === stops[index].node);
    const to = seats.find((seat) => seat.id === stop.node);
    return from && to && from !== to ? [{ from: from.id, to: to.id, ms: stop.wire_ms }] : [];
  });
}

/** Known links between the seats, the slowest one marked. */
function linksOf(state, seats, request) {
  const ids = new Set(seats.map((seat) => seat.id));
  const travelled = new Set(hopsOf(state, seats, request).flatMap((hop) => [`${hop.from} ${hop.to}`, `${hop.to} ${hop.from}`]));
  const shown = onePerPair(state.links).filter((link) => ids.has(link.from) && ids.has(link.to) && !travelled.has(`${link.from} ${link.to}`));
  const slowest = Math.max(0, ...shown.map((link) => link.rtt_ms));
  const typical = shown.map((link) => link.rtt_ms).sort((one, other) => one - other)[Math.floor(shown.length / 2)] ?? 0;
  return shown.map((link) => ({ ...link, rtt_ms: Math.round(link.rtt_ms * 10) / 10, isSlow: link.rtt_ms === slowest && slowest > 3 * typical }));
}

function onePerPair(links) {
  const pairs = new Map();
  for (const link of links) {
    const pair = [link.from, link.to].sort().join(" ");
    if (!(pairs.get(pair)?.rtt_ms >= link.rtt_ms)) pairs.set(pair, link);
  }
  return [...pairs.values()];
}

function centreOf(request, plan, model) {
  if (request?.phase === "decode") return { figure: rate(request.tokens_per_s), words: "tokens/s", isBusy: true };
  if (request) return { figure: "", words: PHASES[request.phase] ?? request.phase, isBusy: true };
  if (!model.can_answer) return { figure: "", words: "layers missing", isBusy: false };
  if (plan) return { figure: rate(plan.expected_tokens_per_s), words: "tokens/s expected", isBusy: false };
  return { figure: "", words: "at rest", isBusy: false };
}

function draw({ seats, hops, links, centre, more }) {
  const find = (id) => seats.find((seat) => seat.id === id);
  const words = `${seats.map((seat) => `${seat.name}: ${seat.holds || "no layers"}, ${seat.state}`).join("; ")}.`;
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "table-picture", role: "img", "aria-label": `The machines: ${words}` },
    svg("ellipse", { class: "table-top", cx: CENTRE.x, cy: CENTRE.y, rx: SEATS.x - 8, ry: SEATS.y - 4 }),
    ...links.map((link) => drawLink(find(link.from), find(link.to), link)),
    ...hops.map((hop, index) => drawHop(find(hop.from), find(hop.to), index)),
    drawCentre(centre),
    ...links.filter((link) => link.isSlow).map((link) => drawSlow(find(link.from), find(link.to), link, seats)),
    ...hops.map((hop) => drawHopTime(find(hop.from), find(hop.to), hop.ms)),
    ...seats.map(drawSeat),
    more > 0 ? svg("text", { class: "more", x: WIDTH - 8, y: HEIGHT - 8, "text-anchor": "end", text: `and ${more} more` }) : null);
}

/** Where the way between two seats passes: over the table, around the dish in its middle; there and back differ, so both can be seen. */
function passing(from, to) {
  const middle = { x: (from.x + to.x) / 2 - CENTRE.x, y: (from.y + to.y) / 2 - CENTRE.y };
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const aside = { x: -(to.y - from.y) / length, y: (to.x - from.x) / length };
  const away = Math.hypot(middle.x / DISH.x, middle.y / DISH.y); // 1 is the rim of the dish
  const scale = away < 1.2 ? 1.2 / Math.max(away, 0.05) : 1;
  const isCentral = away < 0.05;
  return {
    x: CENTRE.x + (isCentral ? aside.x * DISH.x * 1.2 : middle.x * scale) + aside.x * 7,
    y: CENTRE.y + (isCentral ? aside.y * DISH.y * 1.2 : middle.y * scale) + aside.y * 7,
  };
}

/** The control point of the curve through `passing`. */
function bow(from, to) {
  const through = passing(from, to);
  return { x: 2 * through.x - (from.x + to.x) / 2, y: 2 * through.y - (from.y + to.y) / 2 };
}

function pathOf(from, to) {
  const control = bow(from, to);
  return `M${from.x.toFixed(1)} ${from.y.toFixed(1)} Q${control.x.toFixed(1)} ${control.y.toFixed(1)} ${to.x.toFixed(1)} ${to.y.toFixed(1)}`;
}

function drawLink(from, to, link) {
  const words = `${from.name} – ${to.name}: ${milliseconds(link.rtt_ms)} round trip, ${Math.round(link.mbit_s)} Mbit/s`;
  return svg("g", { class: link.isSlow ? "link slow" : "link" },
    svg("line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y }), svg("title", { text: words }));
}

/** The mark of the slow link stands on it, clear of the dish and of all seats as far as that can be had. */
function drawSlow(from, to, link, seats) {
  const places = [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74].map((share) => ({ x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * share }));
  const at = places.reduce((best, place) => (room(place, seats) > room(best, seats) + 4 ? place : best));
  return svg("text", { class: "slow-time", x: at.x, y: at.y + 4, "text-anchor": "middle", text: `slow: ${milliseconds(link.rtt_ms)}` });
}

/** How many units the words around a place are away from the nearest seat or the dish; more than enough counts as enough. */
function room(place, seats) {
  const beside = seats.map((seat) => Math.hypot(Math.max(0, Math.abs(seat.x - place.x) - 34), seat.y - place.y) - SEAT_RADIUS);
  const dish = (Math.hypot((place.x - CENTRE.x) / (DISH.x + 20), (place.y - CENTRE.y) / (DISH.y + 6)) - 1) * DISH.y;
  return Math.min(12, dish, ...beside);
}

function drawHop(from, to, index) {
  return svg("path", { class: "hop", d: pathOf(from, to), data: { testid: "hop" }, style: { "--hop": String(index) } });
}

function drawHopTime(from, to, ms) {
  if (ms === null) return null;
  const at = passing(from, to);
  return svg("text", { class: "hop-time", x: at.x, y: at.y + 4, "text-anchor": "middle", text: milliseconds(ms) });
}

function drawCentre({ figure, words, isBusy }) {
  return svg("g", { class: isBusy ? "centre busy" : "centre" },
    svg("ellipse", { class: "dish", cx: CENTRE.x, cy: CENTRE.y + 2, rx: DISH.x, ry: DISH.y }),
    svg("text", { class: "figure", x: CENTRE.x, y: CENTRE.y + 4, "text-anchor": "middle", text: figure }),
    svg("text", { class: "caption", x: CENTRE.x, y: CENTRE.y + (figure ? 22 : 4), "text-anchor": "middle", text: words }));
}

function drawSeat(seat) {
  const around = 2 * Math.PI * SEAT_RADIUS;
  const isAbove = seat.y < CENTRE.y - 20; // its name stands outside the table
  const name = seat.name.length > 16 ? `${seat.name.slice(0, 15)}…` : seat.name;
  return svg("g", { class: `seat ${seat.state}${seat.isActive ? " active" : ""}`, data: { testid: "seat", node: seat.id }, transform: `translate(${seat.x.toFixed(1)} ${seat.y.toFixed(1)})` },
    svg("circle", { class: "plate", r: SEAT_RADIUS }),
    svg("circle", { class: "filled", r: SEAT_RADIUS, "stroke-dasharray": `${((around * seat.used) / 100).toFixed(1)} ${around.toFixed(1)}`, transform: "rotate(-90)" }),
    svg("text", { class: "initial", y: 5, "text-anchor": "middle", text: (seat.name[0] ?? "?").toUpperCase() }),
    svg("text", { class: "name", y: isAbove ? -SEAT_RADIUS - 21 : SEAT_RADIUS + 16, "text-anchor": "middle", text: seat.isSelf ? `${name} (you)` : name }),
    svg("text", { class: "holds", y: isAbove ? -SEAT_RADIUS - 8 : SEAT_RADIUS + 29, "text-anchor": "middle", text: seat.state === "online" ? seat.holds : seat.state }),
    svg("title", { text: `${seat.name}: ${seat.used} % of its memory in use here` }));
}
