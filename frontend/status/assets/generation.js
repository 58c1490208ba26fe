// Models that generate: sequences, cache, tokens, first tokens, hits of prefixes. Hidden while there are none.

const GENERATION_COLUMNS = [
  ["name", "Model", "", "The name that a request names."],
  ["running", "Running", "num", "Sequences that are computed together, of those that may be. A request has one sequence for each choice."],
  ["waiting", "Waiting", "num", "Sequences that wait for their turn, or for cache blocks."],
  ["cache", "Cache blocks", "", "Blocks of the key-value cache in use, of all. A sequence needs more blocks the longer it gets."],
  ["output", "Tokens/s out", "num", "Tokens written in a second, over all sequences."],
  ["written", "Out, 90 s", "wide", "Tokens written in a second, as this page saw them."],
  ["prompt", "Tokens/s in", "num", "Tokens of prompts read in a second."],
  ["first", "First token", "num", "Mean time from a request to its first token."],
  ["hits", "Prefix hits", "num", "Share of prompts whose beginning was in the cache already, and was not read again."],
  ["preemptions", "Preempted", "num", "Sequences that gave their blocks to an older one, and are computed again later."],
];
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
        const rate = this.past.rate(`${count} ${model.name}`);
        rate.note(frame.timestamp, generation[count]);
        this.past.track(`${count} ${model.name}`).note(frame.timestamp, rate.value);
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
    this.list = new Keyed(byId("generations"), ({ name }) => this.create(name));
    heads(byId("generation-head"), GENERATION_COLUMNS);
  }

  create(name) {
    const view = rowOf(GENERATION_COLUMNS);
    view.cache = withTrack(view.cells.cache, "Cache blocks in use");
    view.written = new Spark(view.cells.written, `Tokens written by ${name}`, 1, asCount, [[`output_tokens ${name}`, "tokens/s", "one"]]);
    return view;
  }

  draw(frame) {
    this.history.note(frame);
    const models = frame.models.filter((model) => model.generation);
    byId("generation").hidden = !models.length;
    this.list.draw(models, (model) => model.name, (view, model) => this.update(view, model.name, model.generation));
  }

  update(view, name, generation) {
    put(view, "name", name);
    view.cells.name.title = name;
    put(view, "running", `${asCount(generation.running)} of ${asCount(generation.capacity)}`, !generation.running);
    put(view, "waiting", asCount(generation.waiting), !generation.waiting);
    const share = generation.blocks_total ? generation.blocks_used / generation.blocks_total : null;
    view.cache(share, `${asCount(generation.blocks_used)} of ${asCount(generation.blocks_total)}`);
    const output = this.past.rate(`output_tokens ${name}`).value;
    const prompt = this.past.rate(`prompt_tokens ${name}`).value;
    put(view, "output", asCount(output), !output);
    view.written.draw(this.past);
    put(view, "prompt", asCount(prompt), !prompt);
    const first = this.history.firstToken.get(name);
    put(view, "first", asMs(first * 1000), !known(first));
    const hits = generation.prefix_lookups ? generation.prefix_hits / generation.prefix_lookups : null;
    put(view, "hits", asPercent(hits), !generation.prefix_hits);
    put(view, "preemptions", asCount(generation.preemptions), !generation.preemptions);
  }
}
