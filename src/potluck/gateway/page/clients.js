// Ready settings for the clients that people have. Text only; the address and the key come from the node.

export const NO_KEY = "not-needed"; // what clients are given that refuse to start without any

/** [{name, note, text}] for this base URL (which ends in /v1), key and model. */
export function clientSettings(baseUrl, key, model) {
  const root = baseUrl.replace(/\/v1\/?$/, "");
  const quoted = JSON.stringify(key);
  return [
    { name: "OpenAI Python", note: "pip install openai", text: `from openai import OpenAI\n\nclient = OpenAI(base_url="${baseUrl}", api_key=${quoted})\nstream = client.chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n    stream=True,\n)\nfor chunk in stream:\n    print(chunk.choices[0].delta.content or "", end="")` },
    { name: "curl", note: "any shell", text: `curl -N ${baseUrl}/chat/completions \\\n  -H "Authorization: Bearer ${key}" -H "Content-Type: application/json" \\\n  -d '{"model": "${model}", "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'` },
    { name: "Open WebUI", note: "Admin Settings → Connections → OpenAI API", text: `URL: ${baseUrl}\nKey: ${key}` },
    { name: "VS Code Copilot", note: "Manage Models → Ollama; in settings.json:", text: `"github.copilot.chat.byok.ollamaEndpoint": "${root}"` },
    { name: "Zed", note: "settings.json", text: `"language_models": {\n  "ollama": { "api_url": "${root}" }\n}` },
    { name: "Continue", note: "~/.continue/config.yaml", text: `models:\n  - name: Potluck\n    provider: openai\n    model: ${model}\n    apiBase: ${baseUrl}\n    apiKey: ${key}` },
    { name: "Cline / Roo", note: "Provider: OpenAI Compatible", text: `Base URL: ${baseUrl}\nAPI key: ${key}\nModel ID: ${model}` },
    { name: "aider", note: "shell", text: `export OPENAI_API_BASE=${baseUrl}\nexport OPENAI_API_KEY=${key}\naider --model openai/${model}` },
    { name: "Claude Code", note: "shell", text: `export ANTHROPIC_BASE_URL=${root}\nexport ANTHROPIC_AUTH_TOKEN=${key}\nexport ANTHROPIC_MODEL=${model}\nclaude` },
    { name: "Codex CLI", note: "~/.codex/config.toml", text: `model = "${model}"\nmodel_provider = "potluck"\n\n[model_providers.potluck]\nname = "Potluck"\nbase_url = "${baseUrl}"\n${key === NO_KEY ? "" : 'env_key = "POTLUCK_API_KEY"\n'}wire_api = "responses"` },
    { name: "LangChain", note: "pip install langchain-openai", text: `from langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(base_url="${baseUrl}", api_key=${quoted}, model="${model}")\nprint(model.invoke("Hello").content)` },
    { name: "LiteLLM", note: "pip install litellm", text: `import litellm\n\nlitellm.completion(model="openai/${model}", api_base="${baseUrl}", api_key=${quoted},\n                   messages=[{"role": "user", "content": "Hello"}])` },
    { name: "Ollama", note: "pip install ollama", text: `from ollama import Client\n\nclient = Client(host="${root}")\nclient.chat(model="${model}", messages=[{"role": "user", "content": "Hello"}])` },
    { name: "lm-eval", note: "pip install lm-eval[api]", text: `lm_eval --model local-completions --tasks hellaswag \\\n  --model_args model=${model},base_url=${baseUrl}/completions,tokenizer_backend=remote` },
  ];
}
