// A conversation with a model that writes text. Whatever the model writes is shown as text, never as HTML.

// Tokens that all come in a shorter time than this have no rate that says anything about the model.
const LEAST_WRITING_S = 0.1;

class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    this.choice = new Choice(
      "chat", (model) => (model.config.outputs.includes("chat") ? [[model.name, model.name]] : []), "model that writes text",
      "Start the server with one: penstock serve FILE.gguf, or make run-chat for a small one.", () => {},
    );
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  draw(frame) {
    this.choice.draw(frame);
  }

  clear() {
    if (this.running) this.running.abort();
    this.messages = [];
    this.log.replaceChildren();
    byId("chat-empty").hidden = false;
    this.input.focus();
  }

  body() {
    const system = byId("chat-system").value.trim();
    const temperature = byId("chat-temperature").value;
    return {
      model: this.choice.value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      max_tokens: Number(byId("chat-most").value) || 256,
      ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    };
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.choice.box.disabled) return;
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.say("user", text);
    this.input.value = "";
    const turn = this.say("assistant", "");
    const running = new AbortController();
    this.running = running;
    this.working(true);
    turn.root.setAttribute("aria-busy", "true");
    const began = performance.now();
    try {
      for await (const event of events(await ask("/v1/chat/completions", this.body(), running.signal))) {
        this.take(turn, event, began);
      }
      setText(turn.note, this.counts(turn));
    } catch (error) {
      setText(turn.note, running.signal.aborted ? "Stopped." : error.message);
      turn.note.classList.toggle("bad", !running.signal.aborted);
    }
    // An answer that did not begin leaves the conversation as if nothing had been asked.
    if (turn.text) messages.push({ role: "assistant", content: turn.text });
    else messages.pop();
    turn.root.removeAttribute("aria-busy");
    if (this.running === running) {
      this.running = null;
      this.working(false);
    }
    this.follow(turn.atEnd);
  }

  working(on) {
    setText(byId("chat-send"), on ? "Stop" : "Send");
    this.choice.busy = on;
    this.choice.say();
  }

  // One message in the log; `text` and `thought` of an answer grow.
  say(role, text) {
    byId("chat-empty").hidden = true;
    const turn = { root: make("li", `turn ${role}`), text, thought: "" };
    turn.root.append(make("span", "role", role === "user" ? "You" : asShortModel(this.choice.value)));
    turn.thinking = make("details", "thinking");
    turn.thinking.hidden = true;
    turn.thoughts = make("p", "words");
    turn.thinking.append(make("summary", "", "Thoughts"), turn.thoughts);
    turn.words = make("p", "words", text);
    turn.note = make("p", "turn-note");
    turn.root.append(turn.thinking, turn.words, turn.note);
    this.log.append(turn.root);
    this.follow(true);
    return turn;
  }

  take(turn, event, began) {
    turn.atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    if (event.usage) turn.usage = event.usage;
    for (const { delta, finish_reason: reason } of event.choices) {
      if (delta.reasoning_content) {
        turn.thought += delta.reasoning_content;
        turn.thinking.hidden = false;
        setText(turn.thoughts, turn.thought);
      }
      if (delta.content) {
        turn.text += delta.content;
        setText(turn.words, turn.text);
      }
      if (delta.content || delta.reasoning_content) turn.firstMs = turn.firstMs ?? performance.now() - began;
      turn.reason = reason || turn.reason;
    }
    this.follow(turn.atEnd);
  }

  // Nobody who reads further up is moved away.
  follow(wanted) {
    if (wanted) this.log.scrollTop = this.log.scrollHeight;
  }

  counts(turn) {
    const usage = turn.usage || {};
    return [
      known(usage.completion_tokens) ? plural(usage.completion_tokens, "token") : "",
      usage.total_completion_time_sec >= LEAST_WRITING_S ? `${asCount(usage.avg_compl_tok_per_sec)} tokens/s` : "",
      known(turn.firstMs) ? `first after ${asMs(turn.firstMs)}` : "",
      turn.reason === "length" ? "cut: the most tokens were reached" : "",
    ].filter(Boolean).join(" · ");
  }
}
