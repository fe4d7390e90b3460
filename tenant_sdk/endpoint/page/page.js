// The page of an endpoint: a chat with any model, and what is in force. It speaks to its own server only, keeps the key
// in memory, and puts texts of models into the page as text, never as HTML.
"use strict";

const at = (id) => document.getElementById(id);
let key = "";
let turns = [];
let underWay = null;
let isWatching = false;

async function call(path, options = {}) {
  const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `status ${answer.status}`);
}

function element(tag, text, kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

function show(kind, text) {
  const made = at("turns").appendChild(element("div", text, `turn ${kind}`));
  made.scrollIntoView({ block: "end" });
  return made;
}

let known = "";

// Lists the models anew if there are others than before, such as the adapter of a job that is done.
async function showModels() {
  const models = (await (await call("/v1/models")).json()).data.map((model) => model.id);
  if (models.join("\n") === known) return;
  known = models.join("\n");
  const chosen = at("model").value;
  at("model").replaceChildren(...models.map((id) => new Option(id, id)));
  if (models.includes(chosen)) at("model").value = chosen;
}

async function open() {
  await refresh();
  if (!isWatching) {
    isWatching = true;
    setInterval(() => refresh().catch(() => {}), 3000);
  }
}

async function refresh() {
  await showModels();
  const status = await (await call("/v1/status")).json();
  showAdapters(status.adapters);
  if (status.adapters) await showJobs();
  at("requests").textContent = `${status.running} running, ${status.waiting} waiting`;
  at("warning").textContent = status.warning ?? "";
  at("warning").hidden = !status.warning;
  at("privacy").replaceChildren(...status.privacy.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}

const TIERS = { device: "on the device", host: "in memory", disk: "on disk", network: "not fetched yet" };

// Lists each adapter with the place from which its next request takes it; the longest list that is shown has 200.
function showAdapters(adapters) {
  const lines = (adapters ?? []).slice(0, 200).map(({ name, tier }) => {
    const line = element("li", name);
    line.append(element("span", TIERS[tier] ?? tier, "tier"));
    return line;
  });
  at("adapters").replaceChildren(...lines);
  const rest = (adapters ?? []).length - lines.length;
  at("tiers").textContent = !adapters ? "none: started without --adapters" : rest > 0 ? `and ${rest} more` : "";
}

// Shows each job with the curve of its losses.
async function showJobs() {
  const jobs = (await (await call("/v1/fine_tuning/jobs")).json()).data.slice(0, 8);
  at("jobs").replaceChildren(...(await Promise.all(jobs.map(jobShown))));
}

async function jobShown(job) {
  const found = await (await call(`/v1/fine_tuning/jobs/${job.id}/losses`)).json();
  const losses = found.data.map(([, loss]) => loss);
  const shown = element("div", "", "job");
  const last = losses.length ? `, loss ${losses.at(-1).toFixed(3)} after ${found.num_steps} steps` : "";
  shown.append(element("div", `${job.user_provided_suffix}: ${job.status}${last}`));
  if (losses.length > 1) shown.append(curve(losses));
  return shown;
}

function curve(losses) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  picture.setAttribute("viewBox", "0 0 100 100");
  picture.setAttribute("preserveAspectRatio", "none");
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const points = losses.map((loss, step) => {
    const x = (100 * step) / (losses.length - 1);
    return `${x.toFixed(2)},${(97 - (94 * (loss - low)) / (high - low || 1)).toFixed(2)}`;
  });
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", points.join(" "));
  picture.append(line);
  return picture;
}

// Yields the objects of a stream of server-sent events.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

async function ask(text) {
  show("user", text);
  const asked = [...turns, { role: "user", content: text }];
  const shown = show("assistant", "");
  underWay = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  let began = 0, pieces = 0;
  try {
    const body = JSON.stringify({
      model: at("model").value, messages: asked, stream: true, stream_options: { include_usage: true },
    });
    const answer = await call("/v1/chat/completions", { method: "POST", body, signal: underWay.signal });
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices[0]?.delta?.content ?? "";
      const tokens = chunk.usage?.completion_tokens;
      if (piece) {
        began ||= performance.now();
        pieces += 1;
        shown.textContent += piece;
        shown.scrollIntoView({ block: "end" });
      }
      const seconds = (performance.now() - began) / 1000;
      if (pieces > 1) at("speed").textContent = `${(((tokens ?? pieces) - 1) / seconds).toFixed(1)} tokens/s`;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  underWay = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  if (shown.textContent) turns = [...asked, { role: "assistant", content: shown.textContent }];
  await refresh().catch(() => {});
}

at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  open().then(() => at("prompt").focus(), (error) => show("error", error.message));
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || underWay) return;
  at("prompt").value = "";
  ask(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => underWay?.abort());
at("fresh").addEventListener("click", () => {
  turns = [];
  at("turns").replaceChildren();
});
