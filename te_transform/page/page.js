// Draws the blocks of a page from the data that html.py writes, with the layout of dagre.js.
//
// An operation is [title, value, rule, kind, pair, reads, is inactive]. Operations of both sides with the same pair
// compute the same values. The pairs of a block are laid out once, and drawn twice: a fused operation has the place and
// the size of all that it replaces. Text is only ever inserted as text, so no name can inject HTML.
"use strict";

const blocks = JSON.parse(document.getElementById("data").textContent);
const cards = [...document.querySelectorAll(".block")];
const detail = document.getElementById("detail");
const hint = detail.firstElementChild;
const search = document.getElementById("search");
const minor = document.getElementById("minor");
const [TITLE, VALUE, RULE, KIND, PAIR, READS] = [0, 1, 2, 3, 4, 5];
// Pixels: the title and the margin of a frame, between boxes and between ranks, and the room for edges beside boxes.
const TOP = 26, INSIDE = 10, GAP = 14, RANKS = 30, LANE = 10;
const BOX = { operation: [126, 40], port: [104, 32] }, SMALL = { operation: [106, 38], port: [88, 31] };
// The smallest scales: of two pictures side by side, of one without folded ranks, and of one that then scrolls.
const LEAST = 0.75, NESTED = 0.9, READABLE = 0.6;

document.body.insertAdjacentHTML("beforeend", `<svg id="definitions" width="0" height="0" aria-hidden="true"><defs>
  <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">
  <path d="M0 0L8 4L0 8z"></path></marker></defs></svg>`);
const definitions = document.getElementById("definitions");

// ---- what is drawn -------------------------------------------------------------------------------------------------

// Return the operations of a side that are shown, by number, and their edges, which pass through hidden operations.
function shown(operations) {
  const isShown = operations.map(each => minor.checked || each[KIND] !== "minor");
  const known = new Map();
  const sources = number => {
    if (!known.has(number)) {
      known.set(number, [...new Set(operations[number][READS].flatMap(read => (isShown[read] ? [read] : sources(read))))]);
    }
    return known.get(number);
  };
  const edges = operations.flatMap((_, to) => (isShown[to] ? sources(to).map(from => [from, to]) : []));
  const linked = new Set(edges.flat());
  const numbers = operations.map((_, n) => n).filter(n => isShown[n] && (linked.has(n) || !isPort(operations[n])));
  return { operations, numbers, edges };
}

// Return places and routes of boxes [id, [width, height], is a port] in a dagre graph. If its width at this
// scale is more than `room`, wide ranks are folded, and the narrowest of some attempts is returned.
function laidOut(sizes, edges, room, scale) {
  const links = [...edges].map(edge => edge.map(String));
  const attempt = least => {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: GAP, edgesep: GAP / 2, ranksep: RANKS, marginx: 2, marginy: 2 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const [id, [width, height]] of sizes) graph.setNode(id, { width, height });
    for (const edge of links) graph.setEdge(...edge);
    dagre.layout(graph);
    if (least) { fold(graph, least); dagre.layout(graph); }
    return graph;
  };
  let best = attempt(0);
  for (const share of [1, 0.8, 0.6, 0.45]) {
    if (best.graph().width * scale <= room) break;
    const found = attempt(share * room);
    if (found.graph().width < best.graph().width) best = found;
  }
  return inOrder(whole(best), sizes.filter(([, , port]) => !port).map(([id]) => id));
}

// Move and widen a layout until it has room for its edges too, which dagre does not count.
function whole(graph) {
  const points = graph.edges().flatMap(edge => graph.edge(edge).points);
  const left = Math.min(0, ...points.map(({ x }) => x - 3)), right = Math.max(graph.graph().width, ...points.map(({ x }) => x + 3));
  for (const each of [...points, ...graph.nodes().map(id => graph.node(id))]) each.x -= left;
  graph.graph().width = right - left;
  return graph;
}

// Mirror a layout if that brings more boxes of a rank into their order in the model.
function inOrder(graph, ids) {
  const boxes = ids.map(id => graph.node(id));
  const order = boxes.flatMap((one, n) => boxes.slice(n + 1).map(other => (one.y === other.y ? Math.sign(other.x - one.x) : 0)));
  if (order.reduce((sum, each) => sum + each, 0) >= 0) return graph;
  const mirrored = point => { point.x = graph.graph().width - point.x; };
  graph.nodes().map(id => graph.node(id)).forEach(mirrored);
  for (const edge of graph.edges()) graph.edge(edge).points.forEach(mirrored);
  return graph;
}

// Divide the ranks that are too wide: their later boxes come below the earlier ones.
function fold(graph, room) {
  const ranks = Map.groupBy(graph.nodes(), id => graph.node(id).y);
  for (const ids of ranks.values()) {
    ids.sort((one, other) => graph.node(one).x - graph.node(other).x);
    const rows = [[]];
    let taken = 0;
    for (const id of ids) {
      const width = graph.node(id).width + GAP;
      if (taken + width > room && rows.at(-1).length) { rows.push([]); taken = 0; }
      rows.at(-1).push(id);
      taken += width;
    }
    for (let row = 1; row < rows.length; row++) {
      rows[row].forEach((id, place) => graph.setEdge(rows[row - 1][place % rows[row - 1].length], id, { only: "order" }));
    }
  }
}

const isPort = operation => operation[KIND] === "port" || operation[KIND] === "input";

// Return the layout of some operations, as its size, the box of each, and the points of an edge between two.
function arranged(side, numbers, room, isNested) {
  const box = isNested ? SMALL : BOX;
  const own = new Set(numbers);
  const edges = side.edges.filter(edge => edge.every(n => own.has(n)));
  const sizes = numbers.map(n => [n, isPort(side.operations[n])]).map(([n, port]) => [String(n), port ? box.port : box.operation, port]);
  const graph = laidOut(sizes, edges, room, isNested ? NESTED : LEAST);
  const { width, height } = numbers.length ? graph.graph() : { width: 0, height: 0 };
  return { width, height, at: n => graph.node(String(n)), route: (from, to) => passed(graph, inner(graph.edge(String(from), String(to)))) };
}

// Return the layout of all pairs. If `isNested`, fused operations are frames around what they replace.
function planned(sides, room, isNested) {
  const pairs = new Map();
  sides.forEach((side, place) => side.numbers.forEach(number => {
    const pair = side.operations[number][PAIR];
    if (!pairs.has(pair)) pairs.set(pair, [[], []]);
    pairs.get(pair)[place].push(number);
  }));
  const inside = new Map(), sizes = [];
  for (const [pair, numbers] of [...pairs].sort((one, other) => one[0] - other[0])) {
    if (isNested && !numbers[1].length && isPort(firstOf(sides, numbers))) continue;
    const isFrame = isNested && isFused(sides, numbers);
    const found = numbers.map((each, place) => arranged(sides[place], each, room - 2 * INSIDE, isNested));
    const height = Math.max(found[0].height, isFrame ? 0 : found[1].height) + (isFrame ? TOP + INSIDE : 0);
    const beside = isFrame ? INSIDE : found.some((each, place) => hasLane(sides[place], numbers[place], each)) ? LANE : 0;
    const width = Math.max(found[0].width, found[1].width) + 2 * beside;
    inside.set(pair, { numbers, found, isFrame });
    sizes.push([String(pair), [width, height], isPort(firstOf(sides, numbers))]);
  }
  const edges = linked(sides, inside);
  const direct = [...edges.values()].filter(({ via }) => !via.length).map(({ from, to }) => [from, to]);
  return { graph: laidOut(sizes, direct, room, isNested ? NESTED : LEAST), inside, edges };
}

// Return true if an edge of a pair passes other boxes of the pair: it leaves above the last, or comes below the first.
function hasLane({ edges }, numbers, { at }) {
  const heights = numbers.map(n => at(n).y), own = new Set(numbers);
  const [first, last] = [Math.min(...heights) + 1, Math.max(...heights) - 1];
  return edges.some(([from, to]) => own.has(from) !== own.has(to) && (own.has(from) ? at(from).y < last : at(to).y > first));
}

// Return the edges between pairs, by "from,to", each with the pairs between its ends that are not on its own side: the
// columns of a merged product stand between the product and what reads it.
function linked(sides, inside) {
  const found = new Map();
  for (const side of sides) for (const edge of side.edges) {
    const [from, to] = edge.map(n => side.operations[n][PAIR]);
    if (from !== to && inside.has(from) && inside.has(to)) found.set(`${from},${to}`, { from, to, via: [] });
  }
  sides.forEach((side, place) => {
    const hidden = [...inside].filter(([, { numbers }]) => !numbers[place].length).map(([pair]) => pair);
    for (const edge of side.edges) {
      const ends = edge.map(n => side.operations[n][PAIR]), link = found.get(ends.join());
      if (link) link.via = hidden.filter(pair => found.has(`${ends[0]},${pair}`) && found.has(`${pair},${ends[1]}`));
    }
  });
  return found;
}

const firstOf = (sides, [before, after]) => (before.length ? sides[0].operations[before[0]] : sides[1].operations[after[0]]);

function isFused(sides, [before, after]) {
  return before.length > 0 && after.some(n => sides[1].operations[n][RULE]);
}

// ---- drawing -------------------------------------------------------------------------------------------------------

function svg(name, attributes, ...children) {
  const made = document.createElementNS(definitions.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const SHORT = { bfloat16: "bf16", float16: "f16", float32: "f32", float64: "f64", int64: "i64", int32: "i32" };

// Return text that fits into a box, with the short names of dtypes and of modules.
function fitting(whole, width, letter) {
  const text = whole.replace(/^\w+(?=\[)/, name => SHORT[name] || name)
    .replace(/^from /, "\u2190 ").replace(/^to /, "\u2192 ").replace(/(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])/g, "");
  const most = Math.floor((width - 10) / letter);
  return text.length > most ? text.slice(0, most - 1) + "\u2026" : text;
}

// Return the box of an operation; a frame has its title at the top, and room for other boxes.
function box(block, place, number, { x, y, width, height }, isFrame) {
  const [title, value, rule, kind, pair, , isInactive] = blocks[block].sides[place][number];
  const replacing = blocks[block].sides[1].find(each => each[PAIR] === pair && each[RULE]);
  const color = kind === "merged" && !rule ? "merge_siblings" : (replacing || [])[RULE];
  const { hues } = blocks[block], hue = hues[color];
  const classes = ["operation", kind, color && "colored", rule && "fused", isInactive && "inactive", isFrame && "frame"].filter(Boolean).join(" ");
  const left = x - width / 2, top = y - height / 2;
  const said = [title, value, color && !rule ? `replaced by ${color}` : "", kind, isInactive && "inactive"].filter(Boolean).join(", ");
  const group = svg("g", {
    class: classes, tabindex: 0, role: "button", "aria-label": said, "data-pair": pair,
    "data-operation": `${place}-${number}`, ...(hue === undefined ? {} : { style: `--hue: ${hue}` }),
  });
  const round = isPort([, , , kind]) ? height / 2 : 7;
  group.append(svg("rect", { x: left, y: top, width, height, rx: round }));
  if (kind === "merged" && rule) {
    const mark = { x: left + 5, y: top + 6, width: 5, height: (isFrame ? TOP : height) - 12, rx: 2 };
    group.append(svg("rect", { class: "merged-mark", style: `--hue: ${hues.merge_siblings}`, ...mark }));
  }
  const middle = isFrame ? top + TOP / 2 + 4 : y - (value ? 3 : -4);
  const atEnds = isPort([, , , kind]) ? width - round : width; // the second line of a port is between its round ends
  const name = fitting(title, width, 7), result = isFrame ? "" : fitting(value, atEnds, 5.2);
  group.append(svg("text", { x, y: middle }, name));
  if (result) group.append(svg("text", { class: "value", x, y: y + 12 }, result));
  if (name !== title || result !== value) group.append(svg("title", {}, [title, value].filter(Boolean).join("\n")));
  const count = blocks[block].sides[0].filter(each => each[PAIR] === pair && each[KIND] !== "minor").length;
  if (rule && count > 1 && !isFrame && height >= 70) {
    group.append(svg("text", { class: "value", x, y: y + 26 }, isInactive ? "inactive" : `in place of ${count}`));
  }
  return group;
}

// Return a line through points that are [x, y], with vertical tangents.
function curve(points) {
  let path = `M${points[0][0]} ${points[0][1]}`;
  for (let n = 1; n < points.length; n++) {
    const [[x, y], [toX, toY]] = [points[n - 1], points[n]];
    const half = (y + toY) / 2;
    path += x === toX ? `V${toY}` : `C${x} ${half} ${toX} ${half} ${toX} ${toY}`;
  }
  return path;
}

const inner = route => (route ? route.points.slice(1, -1) : []);

// Return the points above and below the ranks that a route passes.
function passed(graph, points) {
  const heights = new Map();
  for (const id of graph.nodes()) {
    const { y, height } = graph.node(id);
    heights.set(Math.round(y), Math.max(height, heights.get(Math.round(y)) || 0));
  }
  return points.flatMap(({ x, y }) => {
    const half = (heights.get(Math.round(y)) || 0) / 2;
    return half ? [[x, y - half], [x, y + half]] : [];
  });
}

// Return the points of an edge that pass the ranks between its ends, beside their boxes. Of several edges between the
// same pairs, the edge with this `number` goes through the pair between them with the same number.
function between({ graph, edges }, from, to, number) {
  const { via } = edges.get([from, to].join());
  const pairs = [from, ...(via.length ? [via[Math.min(number, via.length - 1)]] : []), to];
  return passed(graph, pairs.slice(1).flatMap((pair, n) => {
    const route = graph.edge(String(pairs[n]), String(pair));
    return inner(route).concat(route && n < pairs.length - 2 ? [graph.node(String(pair))] : []);
  }));
}

// Return the points of an edge that pass the other boxes of its own pair at the side that is next to `x`: those below
// the spot at its start (`way` 1), or those above the spot at its end (-1).
function beside(area, boxes, spot, x, way) {
  if (!boxes.some(({ y }) => way * (y - spot.y) > 1)) return [];
  const lane = area.x + (x < area.x ? -1 : 1) * (area.width - LANE) / 2;
  return [[lane, spot.y + way * (spot.height / 2 + RANKS - 4)], [lane, area.y + way * area.height / 2]];
}

// Draw one side of a block, or both sides as one picture if `isNested`.
function picture(block, sides, plan, place, isNested) {
  const { graph, inside } = plan, { width, height } = graph.graph();
  const spots = new Map(), lines = [], frames = [], boxes = [];
  for (const [pair, { numbers, found, isFrame }] of inside) {
    const area = graph.node(String(pair));
    const from = isNested && numbers[0].length ? 0 : place;
    for (const number of numbers[from]) {
      const at = found[from].at(number);
      const isWhole = numbers[from].length === 1 && !isFrame;
      const spot = isWhole ? { x: area.x, y: area.y, width: area.width - 4, height: area.height - 4 }
        : { x: area.x - found[from].width / 2 + at.x, y: area.y - found[from].height / 2 + at.y + (isFrame ? (TOP - INSIDE) / 2 : 0), width: at.width, height: at.height };
      spots.set(`${from}-${number}`, spot);
      boxes.push(box(block, from, number, spot, false));
    }
    if (isFrame) {
      frames.push(box(block, 1, numbers[1][0], area, true));
      for (const number of numbers[1]) spots.set(`1-${number}`, area);
    } else if (isNested) {
      numbers[1].forEach((number, n) => spots.set(`1-${number}`, spots.get(`0-${numbers[0][n]}`) || spots.get(`1-${number}`) || area));
    }
  }
  // Return the points of an edge between operations of a pair, and of an edge between two pairs.
  const within = (pair, which, from, to) => {
    const layout = inside.get(pair).found[which], at = layout.at(from), spot = spots.get(`${which}-${from}`);
    return layout.route(from, to).map(([x, y]) => [x + spot.x - at.x, y + spot.y - at.y]);
  };
  const outside = (one, other, which, start, end, number) => {
    const points = between(plan, one, other, number);
    const boxesOf = pair => inside.get(pair).numbers[which].map(n => spots.get(`${which}-${n}`));
    const areaOf = pair => graph.node(String(pair));
    const below = beside(areaOf(one), boxesOf(one), start, [...points, [end.x]][0][0], 1);
    const above = beside(areaOf(other), boxesOf(other), end, [[start.x], ...points].at(-1)[0], -1);
    return [...below, ...points, ...above.reverse()];
  };
  const drawn = new Set(), parallel = new Map();
  for (const which of isNested ? [0, 1] : [place]) for (const [from, to] of sides[which].edges) {
    const [one, other] = [from, to].map(n => sides[which].operations[n][PAIR]);
    const isInner = one === other, number = parallel.get(`${which} ${one} ${other}`) || 0;
    parallel.set(`${which} ${one} ${other}`, number + 1);
    if (isNested && which === (isInner ? 1 : 0)) continue;
    const start = spots.get(`${which}-${from}`), end = spots.get(`${which}-${to}`);
    if (!start || !end || start === end) continue;
    const points = [[start.x, start.y + start.height / 2], ...(isInner ? within(one, which, from, to) : outside(one, other, which, start, end, number)), [end.x, end.y - end.height / 2]];
    const path = curve(points);
    if (!drawn.has(path)) lines.push(svg("path", { d: path, "data-from": one, "data-to": other, "data-ends": `${which}-${from} ${which}-${to}`, "marker-end": "url(#arrow)" }));
    drawn.add(path);
  }
  const size = { viewBox: `0 0 ${width} ${height}`, width, height, style: `min-width: ${READABLE * width}px` };
  return svg("svg", { ...size, role: "group", "aria-label": isNested ? "before and after" : ["before", "after"][place] },
    ...frames, ...lines, ...boxes);
}

// Draw a block into an element, side by side if both sides fit, else nested.
function draw(element) {
  const block = Number(element.closest(".block").dataset.block);
  const sides = blocks[block].sides.map(shown);
  const room = element.clientWidth;
  if (!room) return;
  let plan = planned(sides, room / 2 - GAP, false);
  const isNested = plan.graph.graph().width * LEAST > room / 2 - GAP;
  if (isNested) plan = planned(sides, room, true);
  const figures = (isNested ? [1] : [0, 1]).map(place => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = isNested ? "a frame is one fused operation, and has in it what it replaces" : ["before", "after"][place];
    figure.append(caption, picture(block, sides, plan, place, isNested));
    return figure;
  });
  element.replaceChildren(...figures);
  element.dataset.room = room;
  element.classList.toggle("nested", isNested);
  find();
}

// ---- when it is drawn ----------------------------------------------------------------------------------------------

const drawings = new Set();
const seen = new IntersectionObserver(entries => entries.forEach(entry => {
  if (entry.isIntersecting && Number(entry.target.dataset.room) !== entry.target.clientWidth) draw(entry.target);
}), { rootMargin: "600px" });
const resized = new ResizeObserver(entries => requestAnimationFrame(() => {
  for (const { target } of entries) if (target.dataset.room && Number(target.dataset.room) !== target.clientWidth) draw(target);
  connect();
}));
addEventListener("beforeprint", () => drawings.forEach(element => element.dataset.room || draw(element)));
function watch(element) {
  drawings.add(element);
  seen.observe(element);
  resized.observe(element);
}

// Draw the edges between blocks in the margin, each in a lane of its own as far as others overlap it.
function connect() {
  const column = document.getElementById("blocks");
  const heads = cards.map(card => card.querySelector("summary"));
  const middle = n => heads[n].getBoundingClientRect().top - column.getBoundingClientRect().top + heads[n].offsetHeight / 2;
  const visible = n => cards[n].offsetHeight > 0;
  const edges = blocks.flatMap((block, to) => block.sources.map(from => [from, to])).filter(edge => edge.every(visible));
  edges.sort((one, other) => Math.abs(one[1] - one[0]) - Math.abs(other[1] - other[0]));
  const lanes = [], left = parseFloat(getComputedStyle(column).paddingLeft);
  const lines = edges.map(([from, to]) => {
    const [low, high] = [Math.min(from, to), Math.max(from, to)];
    let lane = lanes.findIndex(taken => taken.every(([a, b]) => b <= low || a >= high));
    if (lane < 0) lane = lanes.push([]) - 1;
    lanes[lane].push([low, high]);
    const x = Math.max(left - 10 - 7 * lane, 3), y = middle(from) + 4, toY = middle(to) - 4, turn = to > from ? 6 : -6;
    const path = `M${left} ${y}H${x + 6}Q${x} ${y} ${x} ${y + turn}V${toY - turn}Q${x} ${toY} ${x + 6} ${toY}H${left - 2}`;
    return svg("path", { d: path, "data-blocks": `${from} ${to}`, "marker-end": "url(#arrow)" });
  });
  column.querySelector(":scope > svg")?.remove();
  column.prepend(svg("svg", { class: "edges", width: left, height: column.offsetHeight, "aria-hidden": "true" }, ...lines));
}

// ---- what a reader does --------------------------------------------------------------------------------------------

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const unmark = name => all(`.${name}`).forEach(each => each.classList.remove(name));

// Mark a pair of a block on both sides, with its edges.
function mark(operation, name) {
  unmark(name);
  if (!operation) return;
  const { pair } = operation.dataset;
  for (const each of all(`[data-pair="${pair}"], [data-from="${pair}"], [data-to="${pair}"]`, operation.closest(".drawing"))) each.classList.add(name);
}

function close() {
  detail.replaceChildren(hint);
  document.body.classList.remove("detailed");
  unmark("open");
}

// Show an operation, and what it replaces or what replaces it, beside the page, or below it on a narrow screen.
function open(operation) {
  mark(operation, "open");
  const card = operation.closest(".block"), [side, number] = operation.dataset.operation.split("-").map(Number);
  const { sides } = blocks[card.dataset.block];
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "close" });
  button.addEventListener("click", close);
  const head = Object.assign(document.createElement("h3"), { textContent: sides[side][number][TITLE] });
  const list = document.createElement("dl");
  for (const place of [side, 1 - side]) {
    const numbers = sides[place].map((_, n) => n).filter(n => sides[place][n][PAIR] === Number(operation.dataset.pair));
    list.append(Object.assign(document.createElement("dt"), { textContent: ["before", "after"][place] }));
    for (const n of numbers.length ? numbers : [null]) {
      const text = document.createElement("dd");
      text.textContent = n === null ? "nothing" : card.querySelector(`.listing [data-operation="${place}-${n}"] pre`).textContent;
      text.classList.toggle("chosen", place === side && n === number);
      list.append(text);
    }
  }
  detail.replaceChildren(button, head, list);
  detail.scrollTop = 0;
  document.body.classList.add("detailed");
  const hidden = operation.getBoundingClientRect().bottom + 12 - detail.getBoundingClientRect().top;
  if (getComputedStyle(detail).position === "fixed" && hidden > 0) scrollBy(0, hidden);
}

// Dim everything without all words of the search.
function find() {
  const words = search.value.toLowerCase().split(" ").filter(Boolean);
  const isFound = text => words.every(word => text.toLowerCase().includes(word));
  document.body.classList.toggle("searching", words.length > 0);
  if (!words.length) { document.getElementById("found").textContent = ""; return; }
  for (const each of all("tr.row")) each.classList.toggle("found", isFound(each.textContent));
  const hits = new Map(cards.map(card => [card, new Set(all(".listing [data-operation]", card).filter(each => isFound(each.textContent)).map(each => each.dataset.operation))]));
  for (const [card, numbers] of hits) {
    card.classList.toggle("found", numbers.size > 0);
    for (const each of all("g.operation", card)) each.classList.toggle("found", numbers.has(each.dataset.operation));
    for (const each of all("path[data-ends]", card)) each.classList.toggle("found", each.dataset.ends.split(" ").every(end => numbers.has(end)));
  }
  const total = [...hits.values()].reduce((sum, numbers) => sum + numbers.size, 0);
  document.getElementById("found").textContent = `${total} found`;
}

document.addEventListener("click", event => {
  const operation = event.target.closest("g.operation");
  if (operation) open(operation);
  else if (!detail.contains(event.target)) close();
});
document.addEventListener("pointerover", event => mark(event.target.closest("g.operation"), "lit"));
document.addEventListener("focusin", event => mark(event.target.closest("g.operation"), "lit"));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { close(); search.value = ""; find(); }
  else if (event.target === search) return;
  else if (event.key === "/") { search.focus(); event.preventDefault(); }
  else if ((event.key === "Enter" || event.key === " ") && event.target.matches("g.operation")) {
    open(event.target);
    event.preventDefault();
  }
});
search.addEventListener("input", find);
minor.addEventListener("change", () => {
  document.body.classList.toggle("with-minor", minor.checked);
  for (const element of drawings) { delete element.dataset.room; element.replaceChildren(); seen.unobserve(element); seen.observe(element); }
  close();
  connect();
});
document.getElementById("every").addEventListener("click", event => {
  const isOpening = cards.some(card => !card.open && card.offsetHeight);
  for (const card of cards) card.open = isOpening;
  event.target.textContent = isOpening ? "close all" : "open all";
});

for (const listing of all(".listing")) listing.open = false;
for (const item of all(".equal li")) { // each layer, to open
  const layer = document.createElement("details"), head = document.createElement("summary"), drawing = document.createElement("div");
  head.append(...item.childNodes);
  drawing.className = "drawing";
  layer.append(head, drawing);
  item.append(layer);
}
for (const element of all(".drawing")) watch(element);
for (const card of cards) { card.addEventListener("toggle", connect, true); resized.observe(card); }
connect();
