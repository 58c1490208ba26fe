// The two views of the page, and what the boxes of the second share: models to choose from, or the reason for none.

const VIEWS = ["live", "try"];

// The view that the address names (`#try`); the live figures otherwise.
class Views {
  constructor() {
    addEventListener("hashchange", () => this.show());
    this.show();
  }

  show() {
    const shown = location.hash === "#try" ? "try" : "live";
    for (const name of VIEWS) {
      byId(`view-${name}`).hidden = name !== shown;
      if (name === shown) byId(`to-${name}`).setAttribute("aria-current", "page");
      else byId(`to-${name}`).removeAttribute("aria-current");
    }
    document.body.dataset.view = shown;
    tip.hide();
  }
}

// The list of models of a box, with `offers` that makes [value, label] pairs of a model. A box without a model that can
// answer is closed, and says why; `kind` says which models the box needs, `advice` how to get one.
class Choice {
  constructor(name, offers, kind, advice, changed) {
    Object.assign(this, { offers, kind, advice, told: "", models: new Map(), busy: false });
    this.select = byId(`${name}-model`);
    this.box = byId(`${name}-box`);
    this.why = byId(`${name}-why`);
    this.changed = changed;
    this.chosen = false;
    this.select.addEventListener("change", () => {
      this.chosen = true;
      changed();
    });
  }

  get value() {
    return this.select.value;
  }

  // The state of the chosen model in the last frame.
  get model() {
    return this.models.get(this.value);
  }

  draw(frame) {
    const found = frame.models.flatMap((model) => this.offers(model).map(([value, label]) => [value, label, model]));
    const order = (model) => ["loaded", "loading", "available", "unloading", "failed"].indexOf(model.state);
    found.sort(([, , one], [, , other]) => order(one) - order(other));
    this.models = new Map(found.map(([value, , model]) => [value, model]));
    // A list that somebody has open must not change under the hand, so it changes with its entries only.
    const told = JSON.stringify(found.map(([value, label]) => [value, label]).sort());
    if (told !== this.told) {
      const before = this.value;
      this.told = told;
      this.select.replaceChildren(...found.map(([value, label]) => {
        const option = make("option", "", label);
        option.value = value;
        return option;
      }));
      if (this.models.has(before)) this.select.value = before;
      this.changed();
    } else if (found.length && !this.chosen && order(this.model) > order(found[0][2])) {
      // Nobody has chosen, so a model that answers sooner takes the place.
      this.select.value = found[0][0];
      this.changed();
    }
    this.say();
  }

  say() {
    const model = this.model;
    const [why, open] = model ? standing(model) : [`This server has no ${this.kind}. ${this.advice}`, false];
    setText(this.why, why);
    this.why.hidden = !why;
    this.why.classList.toggle("closed", !open);
    this.select.disabled = !this.models.size;
    // An answer under way can be stopped, whatever becomes of its model.
    const closed = !open && !this.busy;
    if (this.box.disabled !== closed) this.box.disabled = closed;
  }
}

// What is to be said of a model before somebody asks it, and whether it may be asked.
function standing(model) {
  if (model.state === "loaded") return ["", true];
  if (model.state === "loading") return [`${model.name} is loading: ${Math.round(model.progress * 100)} %. The box opens when the model is loaded.`, false];
  if (model.state === "failed") return [`${model.name} could not be loaded. ${model.last_error.code}: ${model.last_error.message}`, false];
  if (model.state === "unloading") return [`${model.name} is leaving the memory.`, false];
  return [`${model.name} is not in memory. The first request loads the model, which takes a while.`, true];
}
