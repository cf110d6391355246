// A branch's request to the server's OpenAI-compatible API, as a curl command and as a Python program.

const OPENAI = [
  "temperature",
  "top_p",
  "frequency_penalty",
  "presence_penalty",
  "max_tokens",
  "stop",
  "seed",
  "logit_bias",
];

/** The request's path and body. A branch that continues another sends token ids, to continue from exactly there. */
export function request(tree, branch, model) {
  const root = tree.root(branch);
  const settings = { ...branch.settings, seed: branch.seed ?? branch.settings.seed };
  if (!settings.stop?.length) delete settings.stop;
  if (!Object.keys(settings.logit_bias ?? {}).length) delete settings.logit_bias;
  for (const key of Object.keys(settings)) if (settings[key] == null) delete settings[key];
  if (root.prompt.messages && branch.at == null) {
    return {
      path: "/v1/chat/completions",
      body: { model, messages: sent(root.prompt.messages), ...settings, truncation: "auto" },
    };
  }
  const prompt = branch.sent ?? root.prompt.text;
  return { path: "/v1/completions", body: { model, prompt, ...settings } };
}

/** The messages in the server's format. */
export function sent(messages) {
  return messages.map(({ role, content }) => ({ role, content }));
}

export function curl({ path, body }, hasKey) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $GPTWORKS_API_KEY"' : "";
  return `curl ${location.origin}${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

export function python({ path, body }, hasKey) {
  const extra = {},
    usual = {};
  for (const [key, value] of Object.entries(body)) {
    (OPENAI.includes(key) || ["model", "prompt", "messages"].includes(key) ? usual : extra)[key] = value;
  }
  const chat = path.includes("chat");
  const lines = Object.entries(usual).map(([key, value]) => `    ${key}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  const key = hasKey ? 'os.environ["GPTWORKS_API_KEY"]' : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${key})
answer = client.${chat ? "chat." : ""}completions.create(
${lines.join("\n")}
)
print(answer.choices[0].${chat ? "message.content" : "text"})
`;
}

/** A JSON value as a Python literal. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value)
      .map(([k, v]) => `${literal(k)}: ${literal(v)}`)
      .join(", ")}}`;
  return JSON.stringify(value);
}
