// Draws what /page/state and /metrics say, once a second. Text of others is only ever set as text.
"use strict";

const EVERY_MS = 1000, KEPT = 120, CELLS = 1024;
const STATES = ["in use", "leased", "cached", "free"];
const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function call(path, options = {}) {
  try {
    return await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the router does not answer");
  }
}

async function get(path) {
  const answer = await call(path);
  $("key").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "an API key is needed" : `${path}: ${answer.status}`);
  return answer;
}

function element(name, text = "", style = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (style) made.className = style;
  return made;
}

const seconds = (value) => value == null ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;

function color(name) {
  // A canvas takes no light-dark(): the computed color of an element is the one in force.
  const probe = document.body.appendChild(element("span"));
  probe.style.color = `var(--${name.replace(" ", "-")})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// ---- charts: differences of Prometheus counters between two looks -------------------------------------------------

const series = { speed: [], first: [], load: [] };
let before = null;

function metric(text, name) {
  let sum = 0;
  for (const line of text.split("\n"))
    if (line.startsWith(name) && " {".includes(line[name.length])) sum += Number(line.slice(line.lastIndexOf(" ") + 1));
  return sum;
}

function measure(text, state) {
  const now = {
    at: performance.now() / 1000,
    tokens: metric(text, "pagewire_generation_tokens_total"),
    sum: metric(text, "pagewire_time_to_first_token_seconds_sum"),
    count: metric(text, "pagewire_time_to_first_token_seconds_count"),
  };
  if (before && now.tokens >= before.tokens) {
    const speed = (now.tokens - before.tokens) / (now.at - before.at);
    const first = now.count > before.count ? (now.sum - before.sum) / (now.count - before.count) : null;
    keep("speed", speed, (value) => value.toFixed(value < 10 ? 1 : 0));
    keep("first", first, seconds);
    $("speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
    if (first != null) $("first").textContent = seconds(first);
  }
  before = now;
  keep("load", state.running + state.waiting, String);
  $("load").textContent = `${state.running} running, ${state.waiting} waiting`;
}

function keep(name, value, shown) {
  series[name].push(value);
  series[name].splice(0, series[name].length - KEPT);
  draw($(`${name}-chart`), series[name], shown);
}

function penOf(canvas, width, height) {
  // In CSS pixels, whatever the screen has of its own.
  const scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = width * scale;
  canvas.height = height * scale;
  pen.scale(scale, scale);
  return pen;
}

function draw(canvas, values, shown) {
  const width = canvas.clientWidth, height = canvas.clientHeight, pen = penOf(canvas, width, height);
  const most = Math.max(...values.filter((value) => value != null), 1e-9);
  pen.fillStyle = color("faint");
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "top";
  if (most > 1e-9) pen.fillText(`peak ${shown(most)}`, 0, 0);
  pen.fillStyle = color("line");
  pen.fillRect(0, height - 1, width, 1);
  pen.strokeStyle = color("accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  let drawing = false;
  values.forEach((value, index) => {
    if (value == null) return;
    const x = width - (values.length - 1 - index) * (width / (KEPT - 1)), y = height - 4 - (height - 24) * (value / most);
    drawing ? pen.lineTo(x, y) : pen.moveTo(x, y);
    drawing = true;
    if (values[index - 1] == null || values[index + 1] == null) pen.rect(x - 1, y - 1, 2, 2), pen.moveTo(x, y);
  });
  pen.stroke();
}

// ---- workers and requests -----------------------------------------------------------------------------------------

function legend() {
  for (const state of STATES) {
    const mark = element("i");
    mark.style.background = color(state);
    $("legend").append(mark, state);
  }
}

function paint(canvas, blocks) {
  // One cell per block, or per so many blocks that at most CELLS cells are drawn: as many in a row as there is room.
  const total = STATES.reduce((sum, state) => sum + blocks[state], 0), per = Math.max(1, Math.ceil(total / CELLS));
  const cells = Math.ceil(total / per), side = 6, columns = Math.max(1, Math.floor(canvas.clientWidth / side));
  const width = columns * side, height = Math.ceil(cells / columns) * side, pen = penOf(canvas, width, height);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.title = `${STATES.map((state) => `${blocks[state]} ${state}`).join(", ")}; a cell is ${per} block${per > 1 ? "s" : ""}`;
  let cell = 0, upto = 0;
  for (const state of STATES) {
    pen.fillStyle = color(state);
    upto += blocks[state];
    for (; cell < cells && cell * per < upto; cell++)
      pen.fillRect((cell % columns) * side, Math.floor(cell / columns) * side, side - 1, side - 1);
  }
}

function cardOf(worker, state, style) {
  const card = element("div", "", "worker"), head = card.appendChild(element("header"));
  head.append(element("span", worker.role, "role"), element("span", worker.address, "faint"));
  if (state) card.append(element("div", state, style));
  return card;
}

function workerCard(worker) {
  const card = cardOf(worker, worker.state === "serving" ? "" : worker.state, "bad");
  const total = STATES.reduce((sum, state) => sum + worker.blocks[state], 0);
  const held = worker.blocks["in use"] + worker.blocks.leased, step = worker.step_seconds || null;
  card.append(element("div", `${worker.running} running, ${worker.waiting} waiting, step ${seconds(step)}`));
  card.append(element("canvas", "", "map"));
  const use = `KV ${(100 * held / Math.max(1, total)).toFixed(0)}%: ${held} of ${total} blocks of ${worker.block_size} tokens`;
  card.append(element("div", use, "faint"));
  if (worker.kv_path) card.append(element("div", `blocks come by ${worker.kv_path}`, "faint"));
  return card;
}

function requestRow(request) {
  const row = element("tr"), times = request.times;
  row.title = request.id;
  const limit = request.max_tokens == null ? "" : ` of ${request.max_tokens}`;
  for (const text of [
    request.id, `${request.stage}, ${seconds(request.stage_seconds)}`, seconds(request.age),
    seconds(times.queued), request.tokens || times.prefill ? seconds(times.prefill) : "–", seconds(times.first_token),
    `${request.prompt_tokens} + ${request.tokens}${limit}`, Object.values(request.workers).join(", "),
  ]) row.append(element("td", text));
  return row;
}

function show(state) {
  const away = state.absent.map((worker) => cardOf(worker, `away: ${worker.why}`, "bad"));
  $("workers").replaceChildren(...state.workers.map(workerCard), ...away);
  document.querySelectorAll(".map").forEach((canvas, index) => paint(canvas, state.workers[index].blocks));
  $("requests").replaceChildren(...state.requests.map(requestRow));
  const all = state.running + state.waiting;
  $("count").textContent = state.requests.length < all ? `the oldest ${state.requests.length} of ${all}` : `${all}`;
  $("model").textContent = state.model || "";
  $("status").textContent = `${state.ready ? "ready" : "not ready"}, version ${state.version}`;
  $("status").classList.toggle("bad", !state.ready);
}

async function look() {
  try {
    const [state, text] = await Promise.all([
      get("page/state").then((answer) => answer.json()),
      get("metrics").then((answer) => answer.text()),
    ]);
    document.body.classList.remove("old");
    show(state);
    measure(text, state);
  } catch (error) {
    $("status").textContent = error.message;
    $("status").classList.add("bad");
    document.body.classList.add("old");
  }
  setTimeout(look, EVERY_MS);
}

// ---- chat ---------------------------------------------------------------------------------------------------------

let messages = [], running = null;

function turn(who, text = "", style = "") {
  const shown = element("p", text, style);
  shown.dataset.who = who;
  $("turns").append(shown);
  $("turns").scrollTop = $("turns").scrollHeight;
  return shown;
}

async function* deltas(body, signal) {
  const answer = await call("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done; ) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event.choices[0]?.delta?.content ?? "";
    }
  }
}

async function ask(text) {
  const asked = [...messages, { role: "user", content: text }];
  turn("you", text);
  const shown = turn("model");
  running = new AbortController();
  $("stop").hidden = false;
  $("send").disabled = true;
  try {
    for await (const piece of deltas({ messages: asked, stream: true, max_tokens: 512 }, running.signal)) {
      shown.textContent += piece;
      $("turns").scrollTop = $("turns").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") turn("error", error.message, "bad");
  }
  // Without an answer, or when a new chat was begun meanwhile, the question is not part of what the model sees.
  if (!shown.textContent) shown.replaceWith(element("p", "no answer", "faint"));
  else if (shown.isConnected) messages = [...asked, { role: "assistant", content: shown.textContent }];
  $("stop").hidden = true;
  $("send").disabled = false;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = event.target.elements.text, text = field.value.trim();
  if (!text || $("send").disabled) return;
  field.value = "";
  ask(text);
});
$("ask").elements.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("forget").addEventListener("click", () => { running?.abort(); messages = []; $("turns").replaceChildren(); });
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = event.target.elements.key.value;
  sessionStorage.setItem("key", key);
});

legend();
look();
