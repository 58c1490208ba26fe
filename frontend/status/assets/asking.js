"use strict";

// Requests to this server's own routes, with the API key of this page. The key is held in memory only: nothing on the
// machine keeps the key, and a page that is loaded anew asks for the key again.

const access = { key: "" };

function withKey(headers) {
  return access.key ? { ...headers, Authorization: `Bearer ${access.key}` } : headers;
}

// The answer to JSON. Throws an `Error` with the server's words for a status of 400 and above.
async function ask(path, body, signal) {
  const headers = withKey({ "Content-Type": "application/json", Accept: "application/json, text/event-stream" });
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = "";
  try {
    told = errorOf(JSON.parse(text));
  } catch {
    told = text;
  }
  throw new Error(`${answer.status}: ${told || answer.statusText}`);
}

// The message of an error in the form of any of the protocols.
function errorOf(body) {
  return (body.error && body.error.message) || (body.detail && body.detail.message) || body.message || "";
}

// The objects of a stream of events, as they come. Throws an `Error` for an event that is one.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The stream broke off before its end.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (errorOf(event)) throw new Error(errorOf(event));
      yield event;
    }
  }
}

// The name of a model as a part of a path.
function inPath(model) {
  return model.split("/").map(encodeURIComponent).join("/").replaceAll("%3A", ":");
}
