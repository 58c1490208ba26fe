// The connection to /ws/status: opened, watched, and opened again with growing pauses when it ends.

const PROTOCOL = "penstock.status";
const KEY_PROTOCOL = "penstock.key.";
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;
const SILENCE_MS = 4000;
const CHECK_EVERY_MS = 1000;
const DRAW_EVERY_MS = 350;
const HIDDEN_MS = 60000;
const GOING_AWAY = 1001;

const past = new Past();
const panels = [
  new Header(), new Traffic(past), new Devices(past), new Models(past), new Generation(past), new Runs(), new Requests(), new Errors(), new Faults(), new Example(),
  new Operations(past), new Chat(), new Vectors(),
];

class Stream {
  constructor() {
    this.socket = null;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
    this.dropped = 0;
    this.drawnAt = 0;
    this.heardAt = 0;
    this.checkedAt = performance.now();
    byId("retry").addEventListener("click", () => this.open());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      access.key = byId("key").value.trim();
      byId("key").value = "";
      this.open();
    });
    document.addEventListener("visibilitychange", () => this.seen());
    setInterval(() => this.check(), CHECK_EVERY_MS);
  }

  open() {
    clearTimeout(this.timer);
    this.drop();
    const { key } = access;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const address = `${scheme}//${location.host}/ws/status`;
    let socket;
    try {
      socket = new WebSocket(address, key ? [PROTOCOL, KEY_PROTOCOL + key] : [PROTOCOL]);
    } catch {
      // A key with characters that a subprotocol cannot have.
      this.askForKey("This is not a key.");
      return;
    }
    this.socket = socket;
    this.heardAt = performance.now();
    socket.addEventListener("message", (event) => this.take(event.data));
    socket.addEventListener("close", (event) => { if (this.socket === socket) this.lost(event.code === GOING_AWAY); });
  }

  drop() {
    const socket = this.socket;
    this.socket = null;
    this.dropped += 1;
    if (socket) socket.close();
  }

  take(data) {
    const now = performance.now();
    const frame = JSON.parse(data);
    const first = !byId("key-form").hidden || !byId("notice").hidden || !this.drawnAt;
    this.heardAt = now;
    this.pause = FIRST_PAUSE_MS;
    past.note(frame);
    if (!first && now - this.drawnAt < DRAW_EVERY_MS) return;
    this.drawnAt = now;
    byId("key-form").hidden = byId("notice").hidden = true;
    byId("main").hidden = false;
    byId("main").classList.remove("stale");
    this.say("good", "live");
    for (const panel of panels) panel.draw(frame);
  }

  say(tone, text) {
    setTone(byId("live"), tone);
    setText(byId("live-text"), text);
  }

  // The page cannot see why a handshake was refused, so it asks the same address once more over HTTP.
  async lost(drains) {
    this.socket = null;
    this.say("bad", "disconnected");
    const { key } = access;
    const dropped = this.dropped;
    let why = "The connection is lost.";
    try {
      const answer = await fetch("/ws/status", { headers: withKey({}), cache: "no-store", signal: AbortSignal.timeout(SILENCE_MS) });
      const detail = (await answer.json()).detail || {};
      // Somebody did not wait for the answer, or the page fell asleep.
      if (dropped !== this.dropped) return;
      if (answer.status === 401 || answer.status === 403) {
        this.askForKey(key ? detail.message || "This key is not accepted." : "");
        return;
      }
      if (answer.status !== 426) why = detail.message || why;
      drains = drains || detail.code === "DRAINING";
    } catch {
      why = "The server does not answer.";
    }
    if (dropped === this.dropped) this.again(why, drains);
  }

  again(why, drains) {
    const pause = this.pause * (0.75 + Math.random() / 2);
    this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 2);
    this.say("bad", "disconnected");
    if (drains) tellHealth("Draining", "warn", "the server finishes its requests and takes no new ones");
    else tellHealth("Disconnected", "bad");
    byId("main").classList.add("stale");
    setText(byId("notice-text"), `${why} Next try in ${Math.max(1, Math.round(pause / 1000))} s.`);
    byId("notice").hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), pause);
  }

  askForKey(note) {
    access.key = "";
    this.say("warn", "needs a key");
    tellHealth("Key needed", "warn");
    byId("main").hidden = byId("notice").hidden = true;
    byId("key-form").hidden = false;
    if (note) setText(byId("key-note"), note);
    byId("key").value = "";
    byId("key").focus();
  }

  // A connection that is open but silent is as good as lost. Behind a check that comes late, since the page or its
  // machine stood still, frames may wait that the page has not read.
  check() {
    const now = performance.now();
    if (now - this.checkedAt > 2 * CHECK_EVERY_MS) this.heardAt = now;
    this.checkedAt = now;
    if (this.socket && now - this.heardAt > SILENCE_MS) {
      this.drop();
      this.again("The server is silent.");
    }
  }

  // A page that nobody sees does not ask the server for frames.
  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        clearTimeout(this.timer);
        this.drop();
        this.say("idle", "asleep");
        byId("main").classList.add("stale");
      }, HIDDEN_MS);
    } else if (!this.socket && byId("key-form").hidden) {
      this.open();
    }
  }
}

setText(byId("address"), location.host);
new Views();
new Stream().open();
