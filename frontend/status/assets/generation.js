// Models that generate: sequences, cache, tokens, first tokens, hits of prefixes. Hidden while there are none.

const FIRST_TOKEN = "penstock_time_to_first_token_seconds";

// Rates of what engines have counted, and the mean time to the first token of the last requests that had one.
class GenerationPast {
  constructor(past) {
    this.past = past;
    this.firstToken = new Map();
  }

  note(frame) {
    for (const model of frame.models) {
      const generation = model.generation;
      if (!generation) continue;
      for (const count of ["prompt_tokens", "output_tokens"]) {
        this.past.rate(`${count} ${model.name}`).note(frame.timestamp, generation[count]);
      }
      const first = (frame.histograms[FIRST_TOKEN] || {})[model.name];
      if (!first) continue;
      const seconds = this.past.rate(`first seconds ${model.name}`);
      const requests = this.past.rate(`first requests ${model.name}`);
      seconds.note(frame.timestamp, first.sum);
      requests.note(frame.timestamp, first.count);
      const mean = requests.value ? seconds.value / requests.value : this.firstToken.get(model.name) ?? first.sum / first.count;
      this.firstToken.set(model.name, mean);
    }
  }
}

class Generation {
  constructor(past) {
    this.past = past;
    this.history = new GenerationPast(past);
    this.list = new Keyed(byId("generations"), () => this.create());
  }

  create() {
    const view = { root: make("tr"), cells: {} };
    const columns = [
      ["name", "", "model-name"], ["running", "Running", "num"], ["waiting", "Waiting", "num"], ["cache", "Cache blocks", ""],
      ["output", "Tokens/s out", "num"], ["prompt", "Tokens/s in", "num"], ["first", "First token", "num"],
      ["hits", "Prefix hits", "num"], ["preemptions", "Preempted", "num"],
    ];
    for (const [key, label, className] of columns) {
      const cell = make("td", className);
      cell.dataset.label = label;
      view.cells[key] = cell;
      view.root.append(cell);
    }
    const fill = make("div", "fill");
    view.cache = track("Cache blocks in use");
    view.cacheText = make("span");
    fill.append(view.cache, view.cacheText);
    view.cells.cache.append(fill);
    return view;
  }

  draw(frame) {
    this.history.note(frame);
    const models = frame.models.filter((model) => model.generation);
    byId("generation").hidden = !models.length;
    this.list.draw(models, (model) => model.name, (view, model) => this.update(view, model.name, model.generation));
  }

  update(view, name, generation) {
    const put = (key, text, zero) => {
      setText(view.cells[key], text);
      view.cells[key].classList.toggle("zero", Boolean(zero));
    };
    put("name", name);
    view.cells.name.title = name;
    put("running", `${asCount(generation.running)} of ${asCount(generation.capacity)}`, !generation.running);
    put("waiting", asCount(generation.waiting), !generation.waiting);
    const share = generation.blocks_total ? generation.blocks_used / generation.blocks_total : null;
    fillTrack(view.cache, share);
    setText(view.cacheText, `${asCount(generation.blocks_used)} of ${asCount(generation.blocks_total)}`);
    const output = this.past.rate(`output_tokens ${name}`).value;
    const prompt = this.past.rate(`prompt_tokens ${name}`).value;
    put("output", asCount(output), !output);
    put("prompt", asCount(prompt), !prompt);
    const first = this.history.firstToken.get(name);
    put("first", asMs(first * 1000), !known(first));
    const hits = generation.prefix_lookups ? generation.prefix_hits / generation.prefix_lookups : null;
    put("hits", asPercent(hits), !generation.prefix_hits);
    put("preemptions", asCount(generation.preemptions), !generation.preemptions);
  }
}
