// Texts in, vectors or scores out: how long a vector is, how alike texts are, which text answers a query best.

const MOST_TEXTS = 16;
const DRAWN_VALUES = 128;
const VECTOR_OUTPUTS = ["dense", "sparse", "multivector"];

class Vectors {
  constructor() {
    this.choice = new Choice(
      "vectors", offersOf, "model for vectors or scores", "Start the server with one: penstock serve NAME, or make run.",
      () => this.adapt(),
    );
    byId("vectors-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  draw(frame) {
    this.choice.draw(frame);
  }

  get scores() {
    return this.choice.value.startsWith("score ");
  }

  adapt() {
    byId("vectors-query-row").hidden = !this.scores;
    setText(byId("vectors-send"), this.scores ? "Score" : "Encode");
  }

  async send() {
    const texts = byId("vectors-texts").value.split("\n").map((line) => line.trim()).filter(Boolean);
    const out = byId("vectors-out");
    const button = byId("vectors-send");
    if (this.choice.box.disabled || button.getAttribute("aria-disabled") === "true") return;
    if (!texts.length || texts.length > MOST_TEXTS) {
      out.replaceChildren(make("p", "bad", texts.length ? `At most ${MOST_TEXTS} texts, one on each line.` : "Write a text, one on each line."));
      return;
    }
    const model = this.choice.value.slice(this.choice.value.indexOf(" ") + 1);
    const items = texts.map((text) => ({ text }));
    const query = { text: byId("vectors-query").value };
    const began = performance.now();
    button.setAttribute("aria-disabled", "true");
    try {
      const answer = this.scores
        ? await ask(`/v1/score/${inPath(model)}`, { query, items })
        : await ask(`/v1/encode/${inPath(model)}`, { items });
      const found = await answer.json();
      const took = make("p", "turn-note", `${asMs(performance.now() - began)} from this page and back`);
      out.replaceChildren(...(found.scores ? ranked(found.scores, texts) : encoded(found.items, texts)), took);
    } catch (error) {
      out.replaceChildren(make("p", "bad", error.message));
    }
    button.removeAttribute("aria-disabled");
  }
}

// [value, label] of each thing that a model can do here.
function offersOf({ name, config }) {
  const vectors = config.outputs.some((output) => VECTOR_OUTPUTS.includes(output));
  const scores = config.outputs.includes("score") || config.outputs.includes("multivector");
  if (!config.inputs.includes("text")) return [];
  return [...(vectors ? [[`encode ${name}`, `${name}, vectors`]] : []), ...(scores ? [[`score ${name}`, `${name}, scores`]] : [])];
}

// The texts, best first, each with a bar. Scores of a model may be of any size, so the bars span what is there.
function ranked(scores, texts) {
  const values = scores.map((entry) => entry.score);
  const [low, high] = [Math.min(0, ...values), Math.max(...values, 0)];
  const list = make("ol", "ranked");
  for (const { item_id: id, score } of scores) {
    const row = make("li");
    const bar = track("Score");
    fillTrack(bar, (score - low) / (high - low || 1));
    row.append(make("span", "words", texts[Number(id.slice("item-".length))]), bar, make("b", "", score.toFixed(4)));
    list.append(row);
  }
  return [list];
}

function encoded(items, texts) {
  const list = make("ol", "encoded");
  items.forEach((item, at) => {
    const row = make("li");
    row.append(make("span", "words", texts[at]), make("span", "turn-note", sizes(item)));
    if (item.dense) row.append(strip(item.dense.values));
    list.append(row);
  });
  const dense = items.every((item) => item.dense) ? items.map((item) => item.dense.values) : [];
  return dense.length > 1 ? [list, ...alike(dense, texts)] : [list];
}

function sizes({ dense, sparse, multivector }) {
  return [
    dense ? `${dense.dims} numbers: ${dense.values.slice(0, 4).map((value) => value.toFixed(3)).join(", ")}, …` : "",
    sparse ? `${plural(sparse.indices.length, "term")} of ${asCount(sparse.dims)}` : "",
    multivector ? `${plural(multivector.num_tokens, "vector")} of ${multivector.token_dims} numbers` : "",
  ].filter(Boolean).join(" · ");
}

// The first values of a vector as lines up and down.
function strip(values) {
  const drawn = values.slice(0, DRAWN_VALUES);
  const most = Math.max(...drawn.map(Math.abs)) || 1;
  const svg = drawing("strip", `The first ${drawn.length} numbers`);
  svg.setAttribute("viewBox", `0 0 ${drawn.length} 100`);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", drawn.map((value, at) => `M${at + 0.5},50V${(50 - (value / most) * 50).toFixed(1)}`).join(""));
  svg.append(path);
  return svg;
}

// A table of the cosines of all pairs.
function alike(vectors, texts) {
  const table = make("table", "alike");
  const head = make("tr");
  head.append(make("td"), ...texts.map((_, at) => headOf("col", String(at + 1))));
  table.append(head);
  texts.forEach((text, row) => {
    const line = make("tr");
    const name = headOf("row", `${row + 1} ${text}`);
    name.title = text;
    line.append(name, ...vectors.map((vector) => {
      const value = cosine(vectors[row], vector);
      const cell = make("td", "", value.toFixed(2));
      cell.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.round(Math.max(0, value) * 40)}%, transparent)`;
      return cell;
    }));
    table.append(line);
  });
  const box = make("div", "scroll");
  box.append(table);
  return [make("h3", "", "How alike the texts are (cosine)"), box];
}

function headOf(scope, text) {
  const head = make("th", "", text);
  head.scope = scope;
  return head;
}

function cosine(one, other) {
  const dot = (left, right) => left.reduce((sum, value, at) => sum + value * right[at], 0);
  return dot(one, other) / (Math.sqrt(dot(one, one) * dot(other, other)) || 1);
}
