// Runs the tool runner of the SDK against a server: `node tool_runner.js URL whole|streamed`.
// Writes one line of JSON: the status of each request, the cities that the tools were asked for, and the last message.
const Anthropic = require("@anthropic-ai/sdk").default;

const [url, mode] = process.argv.slice(2);
const statuses = [];
const asked = [];

const client = new Anthropic({
  baseURL: url,
  apiKey: "unused",
  maxRetries: 0,
  fetch: async (...request) => {
    const response = await fetch(...request);
    statuses.push(response.status);
    return response;
  },
});

function tool(name, weather) {
  return {
    type: "custom",
    name,
    description: "Weather.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    parse: (input) => input,
    run: async ({ city }) => {
      asked.push(city);
      if (city === "Rome") runner.addTools(tool("forecast", "warm"));
      return `${weather} in ${city}`;
    },
  };
}

const runner = client.beta.messages.toolRunner({
  model: "default",
  max_tokens: 16,
  messages: [{ role: "user", content: "hi" }],
  tools: [tool("weather", "cold")],
  stream: mode === "streamed",
});

runner.runUntilDone().then((message) => console.log(JSON.stringify({ statuses, asked, message })));
