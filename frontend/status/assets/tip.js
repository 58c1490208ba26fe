// The one small window that explains a word or tells the values of a chart. It never covers what it tells about.

const TIP_GAP = 10;

class Tip {
  constructor() {
    this.root = byId("tip");
    const helped = (event) => event.target.closest && event.target.closest("[data-help]");
    const explainIt = (event) => {
      const element = helped(event);
      if (element) this.below(element);
    };
    const leave = (event) => { if (helped(event)) this.hide(); };
    document.addEventListener("pointerover", explainIt);
    document.addEventListener("pointerout", leave);
    document.addEventListener("focusin", explainIt);
    document.addEventListener("focusout", leave);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.hide(); });
    addEventListener("scroll", () => this.hide(), { passive: true });
  }

  below(element) {
    const box = element.getBoundingClientRect();
    this.show([element.dataset.help], box.left + Math.min(box.width, 40) / 2, box.bottom, true);
  }

  // `lines` are texts or elements; above the point `x`, `y`, or below it.
  show(lines, x, y, below) {
    this.root.replaceChildren(...lines.map((line) => (line instanceof Node ? line : make("p", "", line))));
    this.root.hidden = false;
    const { width, height } = this.root.getBoundingClientRect();
    const left = Math.max(8, Math.min(innerWidth - width - 8, x - width / 2));
    const above = y - height - TIP_GAP;
    const top = below || above < 8 ? y + TIP_GAP : above;
    this.root.style.left = `${left}px`;
    this.root.style.top = `${Math.min(top, innerHeight - height - 8)}px`;
  }

  hide() {
    this.root.hidden = true;
  }
}

const tip = new Tip();
