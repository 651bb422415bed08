"use strict";
// The page is whole without this: it sorts tables, says the values of figures, and moves the link's bandwidth.

function seconds(s) { // as units.py: 0.00021 -> "210 us"
  for (const [limit, scale, unit] of [[1e-6, 1e9, "ns"], [1e-3, 1e6, "us"], [1, 1e3, "ms"]]) {
    if (s < limit) return `${plain(s * scale)} ${unit}`;
  }
  return s < 1000 ? `${plain(s)} s` : `${s.toFixed(0)} s`;
}

function plain(value) { // three digits, as Python's .3g below a thousand
  return String(Number(value.toPrecision(3)));
}

function digits(value) { // three of them, without an exponent
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const first = [...body.rows];
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.sort === undefined) return cell.textContent;
    return cell.dataset.sort === "" ? null : Number(cell.dataset.sort);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number")
    ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const keyed = first.map((row) => [key(row, column), row]);
      keyed.sort(([a], [b]) => (a === null || b === null) ? (a === null) - (b === null) : sign * compare(a, b));
      body.append(...keyed.map(([, row]) => row)); // what is unknown stays last
    });
  });
}

function pointed(plot) {
  const said = plot.parentElement.querySelector(".said");
  const marks = [...plot.querySelectorAll(".mark")];
  const most = 8; // said at once, of marks that lie on each other
  let at = -1, over = 0;
  const show = (next, shown) => {
    if (at >= 0) marks[at].classList.remove("on");
    at = next;
    over = shown.length;
    if (at >= 0) marks[at].classList.add("on");
    const lines = shown.slice(0, most).map((mark) => mark.querySelector("title").textContent);
    if (shown.length > most) lines.push(`and ${shown.length - most} more here; the arrow keys go through them`);
    said.textContent = lines.join("\n");
  };
  plot.addEventListener("pointermove", (event) => {
    const under = document.elementsFromPoint(event.clientX, event.clientY).filter((one) => one.matches(".mark"));
    const top = marks.indexOf(under[0]);
    if (top >= 0 && (top !== at || under.length !== over)) show(top, under);
  });
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  plot.addEventListener("keydown", (event) => {
    let next;
    if (event.key in steps) next = at < 0 ? 0 : (at + steps[event.key] + marks.length) % marks.length;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = marks.length - 1;
    else if (event.key === "Escape") next = -1;
    else return;
    event.preventDefault();
    show(next, next >= 0 ? [marks[next]] : []);
    if (next >= 0) marks[next].scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

function link(figure) {
  const key = figure.dataset.key;
  const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const find = (name) => document.getElementById(`${key}-${name}`);
  const bandwidth = find("bandwidth"), cost = find("cost");
  const rows = [...figure.querySelector(".sums").tBodies[0].rows];
  const start = { bandwidth: bandwidth.value, cost: cost.value };
  const move = (name, x, y) => find(name).setAttribute("transform", `translate(${x} ${-y})`);
  const sum = (victims, of) => victims.reduce((total, one) => total + one[0] * of(one), 0);
  const redraw = () => {
    const bytes_per_s = bandwidth.value === start.bandwidth ? data.bandwidth_bytes_per_s : 10 ** bandwidth.value;
    const s_per_position = data.s_per_position * 10 ** cost.value;
    const equal = 2 * data.kv_bytes_per_token / s_per_position;
    const recompute = (one) => one[1] * s_per_position;
    const swap = (one) => 2 * one[2] * data.kv_bytes_per_token / bytes_per_s;
    const texts = { "bandwidth": `${digits(bytes_per_s / 1e9)} GB/s`, "cost": seconds(s_per_position),
      "equal": `${digits(equal / 1e9)} GB/s` };
    for (const [name, text] of Object.entries(texts)) find(`${name}-said`).textContent = text;
    bandwidth.setAttribute("aria-valuetext", texts.bandwidth);
    cost.setAttribute("aria-valuetext", texts.cost);
    const right = data.right * Math.log10(bytes_per_s / data.bandwidth_bytes_per_s), up = data.up * Number(cost.value);
    move("link", right, 0);
    move("swapped", right, -data.up * Math.log10(bytes_per_s / data.bandwidth_bytes_per_s));
    move("recompute", 0, up);
    move("equal", -data.right * Number(cost.value), up);
    data.points.forEach((victims, place) => {
      const all = sum(victims, () => 1), cheaper = sum(victims, (one) => swap(one) < recompute(one) ? 1 : 0);
      const cells = rows[place].cells;
      cells[2].textContent = seconds(sum(victims, recompute));
      cells[3].textContent = seconds(sum(victims, swap));
      cells[4].textContent = `${cheaper.toLocaleString("en")} of ${all.toLocaleString("en")}`;
    });
  };
  bandwidth.addEventListener("input", redraw);
  cost.addEventListener("input", redraw);
  redraw();
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".pointed").forEach(pointed);
document.querySelectorAll("figure.link").forEach(link);
