// The page. It listens to one stream, keeps the sections that came last, and draws those that changed.
// Whatever comes from a machine gets into the page as text, never as markup.

const $ = id => document.getElementById(id);
const PHASES = {
  requested: "prepare", preparing: "prepare", prepare: "prepare",
  starting: "boot", booting: "boot", ready: "boot", start: "boot", boot: "boot", identify: "boot", grow: "boot", setup: "boot",
  running: "run", paused: "run", run: "run",
  stopping: "stop", cleaning: "stop", fetch: "stop", collect: "stop", stop: "stop", clean: "stop",
};
const FIRST = 15;  // machines shown before "show all"
const PERCENTILES = ["p50", "p90", "p99", "max"];
const state = { token: "", sections: {}, all: false, heard: 0, isLive: false };

// -- small helps ------------------------------------------------------------------------------------------------------

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter(child => child != null));
  return made;
}

// The focus stays on what has the same key.
function fill(box, ...children) {
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...children.filter(child => child != null));
  if (key) [...box.querySelectorAll("[data-key]")].find(item => item.dataset.key === key)?.focus();
}

// What stands between backquotes is a command.
const marked = text => text.split("`").map((part, at) => at % 2 ? el("code", {}, part) : part);
const now = () => Date.now() / 1000;
const clock = moment => new Date(moment * 1000).toLocaleTimeString([], { hour12: false });
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}

function size(bytes) {
  return bytes >= 2 ** 30 ? `${+(bytes / 2 ** 30).toFixed(1)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`;
}

const seconds = value => value == null ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value} s`;
const hours = spent => spent < 3600 ? duration(spent) : `${(spent / 3600).toFixed(spent < 36000 ? 1 : 0)} h`;

// -- the stream -------------------------------------------------------------------------------------------------------

const headers = () => state.token ? { Authorization: `Bearer ${state.token}` } : {};
let connection = new AbortController();

async function listen() {
  for (let pause = 1; ; pause = Math.min(pause * 2, 30)) {
    connection = new AbortController();
    try {
      const answer = await fetch("/api/events", { headers: headers(), signal: connection.signal });
      if (answer.status === 401) { setToken(""); askToken("This is not the token."); continue; }
      if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
      pause = 0.5;
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
      show("lost", "the monitor closed the connection");
    } catch (error) {
      if (connection.signal.aborted) { pause = 0.5; continue; }
      show("lost", `no connection since ${clock(state.heard || now())}`);
    }
    await new Promise(done => setTimeout(done, pause * 1000));
  }
}

async function read(reader) {
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    state.heard = now();
    for (const piece of pieces) if (piece.startsWith("data:")) take(JSON.parse(piece.slice(5)));
    show("live", "live");
  }
}

function show(kind, text) {
  state.isLive = kind === "live";
  if ($("link").className !== kind) { $("link").className = kind; }
  if ($("link").textContent !== text) $("link").textContent = text;
}

function reconnect() {
  state.sections = {};
  connection.abort();
}

function setToken(token) {
  state.token = token;
  token ? sessionStorage.setItem("token", token) : sessionStorage.removeItem("token");
}

function take(sections) {
  Object.assign(state.sections, sections);
  if (sections.about) drawAbout(sections.about);
  if (sections.totals || sections.starts || sections.hours) drawTiles();
  if (sections.machines || sections.about || sections.totals) drawMachines();
  if (sections.starts) drawStarts(sections.starts);
  if (sections.causes) drawCauses(sections.causes);
  if (sections.users) drawUsers(sections.users);
  if (sections.nodes) drawNodes(sections.nodes);
  if (sections.modes) drawModes(sections.modes);
}

function drawAbout(about) {
  $("node").textContent = about.node;
  document.title = `belljar · ${about.node}`;
  $("unlock").textContent = about.trusted ? "Forget token" : "Enter token";
  for (const id of ["users-panel", "nodes-panel"]) if (!about.trusted) $(id).hidden = true;
  for (const id of ["filter", "window", "legend"]) $(id).hidden = !about.trusted;
  if (!about.trusted) fill($("modes"));
}

// -- tiles ------------------------------------------------------------------------------------------------------------

function drawTiles() {
  const { totals, starts = [], hours = [] } = state.sections;
  if (!totals) return;
  const all = starts.reduce((sum, path) => sum + path.count, 0);
  const best = starts.find(path => path.path === "clone") || [...starts].sort((one, other) => other.count - one.count)[0];
  const states = Object.entries(totals.states).map(([name, count]) => `${count} ${name}`).join(", ");
  const share = totals.machines ? (100 * totals.failed / totals.machines) : 0;
  fill($("tiles"),
    tile("Machines now", String(totals.live), states || "none lives"),
    tile("In use", `${totals.cpus}`, `cpus, ${size(totals.memory)} of memory`),
    tile("Median start", best ? seconds(best.p50) : "–", best ? `${best.path}; p99 ${seconds(best.p99)}` : `${all} starts`),
    tile("Failed", String(totals.failed), `${share.toFixed(share < 10 ? 1 : 0)} % of ${totals.machines.toLocaleString("en")} in 24 hours`, totals.failed ? "bad" : ""),
    chartTile(hours),
  );
}

const tile = (title, value, text, kind = "") => el("div", { class: `tile ${kind}` }, el("small", {}, title), el("b", {}, value), el("small", {}, text));

function chartTile(hours) {
  const most = Math.max(1, ...hours.map(([, machines]) => machines));
  const last = Math.floor(now() / 3600) * 3600, byHour = new Map(hours.map(row => [row[0], row]));
  const bars = Array.from({ length: 24 }, (_, at) => {
    const [hour, machines, failed] = byHour.get(last - (23 - at) * 3600) || [last - (23 - at) * 3600, 0, 0];
    const text = `${clock(hour).slice(0, 5)}: ${plural(machines, "machine")} ended, ${failed} failed`;
    return el("i", { style: { height: `${100 * machines / most}%` }, title: text }, failed ? el("u", { style: { height: `${100 * failed / machines}%` } }) : null);
  });
  const total = hours.reduce((sum, [, machines]) => sum + machines, 0);
  return el("div", { class: "tile chart" }, el("small", {}, `${plural(total, "machine")} in 24 hours, ${most.toLocaleString("en")} in the busiest`),
    el("div", { class: "columns", role: "img", "aria-label": `${total} machines ended in 24 hours` }, ...bars));
}

// -- machines ---------------------------------------------------------------------------------------------------------

function drawMachines() {
  const { about, machines, totals } = state.sections, box = $("machines");
  if (!about?.trusted) {
    fill(box, el("p", { class: "empty" }, totals?.live ? `${plural(totals.live, "machine")} live here. ` : "", "Names, users and consoles are shown to readers with the token. ",
      el("button", { type: "button", onclick: () => askToken(), "data-key": "ask" }, "Enter token")));
    return;
  }
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = machine => [machine.id, machine.node, machine.name, machine.user, machine.image, machine.requester, machine.state, machine.start, machine.cause].join(" ").toLowerCase();
  const span = +$("window").value, edge = now() - span;
  const fits = (machines || []).filter(machine => words.every(word => text(machine).includes(word)));
  const rows = fits.filter(machine => machine.ended == null || machine.ended > edge || words.length);
  const some = state.all ? rows : rows.slice(0, FIRST), older = fits.length - rows.length;
  const ticks = [0, .25, .5, .75, 1].map(at => el("span", { style: { left: `${100 * at}%` } }, at === 1 ? "now" : `−${duration(span * (1 - at)).replace(" 0 s", "").replace(" 0 min", "")}`));
  const head = el("tr", {}, ...["State", "Machine", "User", "Image"].map(name => el("th", { scope: "col" }, name)), el("th", { scope: "col", class: "num" }, "Start"),
    el("th", { scope: "col", class: "life" }, el("div", { class: "axis" }, ...ticks)), el("th", { scope: "col", class: "num" }, "Age"));
  fill(box,
    rows.length ? el("table", {}, el("thead", {}, head), el("tbody", {}, ...some.map(machine => machineRow(machine, edge, span))))
      : el("p", { class: "empty" }, words.length ? "No machine fits the filter." : `No machine has lived in the last ${duration(span).replace(" 0 s", "").replace(" 0 min", "")}.`),
    rows.length > some.length ? el("p", {}, el("button", { type: "button", "data-key": "all", onclick: () => { state.all = true; drawMachines(); } }, `Show all ${rows.length}`)) : null,
    older ? el("p", { class: "soft" }, `${plural(older, "machine")} ended before that; a longer timeline or a filter shows them.`) : null);
}

function machineRow(machine, edge, span) {
  const begun = machine.phases[0]?.[1] ?? machine.ended ?? now(), end = machine.ended ?? now();
  const ran = machine.phases.find(([name]) => PHASES[name] === "run");
  const last = machine.phases.at(-1)?.[0], isBad = machine.state === "failed" || machine.state === "abandoned";
  const kind = isBad ? "bad" : machine.ended != null ? "" : PHASES[last] || "prepare";
  const label = machine.ended == null ? machine.state : isBad ? machine.cause.split(":")[0] : machine.cause;
  const where = (state.sections.nodes?.length ?? 0) > 1 ? `${machine.node} · ` : "";
  return el("tr", {},
    el("td", {}, el("span", { class: `state ${kind} ${machine.ended != null ? "over" : ""}` }, label)),
    el("td", { class: "cut" }, el("button", { type: "button", class: "plain", "data-key": machine.id, title: machine.reason || machine.requester, onclick: () => openStory(machine.id, machine.node) }, machine.name || machine.id),
      el("small", {}, ` ${where}${machine.name ? machine.id.slice(0, 6) : machine.requester}`)),
    el("td", { class: "cut wide-only" }, machine.user),
    el("td", { class: "cut wide-only" }, machine.image, el("small", {}, ` ${machine.cpus} cpu, ${size(machine.memory)}`)),
    el("td", { class: "num wide-only" }, ran ? duration(ran[1] - begun) : "–", el("small", {}, ` ${machine.start}`)),
    el("td", { class: "life" }, track(machine.phases, end, edge, span, isBad)),
    el("td", { class: "num" }, duration(Math.max(end - begun, 0)), machine.ended != null ? el("small", {}, ` ${clock(machine.ended)}`) : null));
}

function track(phases, end, edge, span, isBad) {
  const parts = phases.map(([name, from], at) => {
    const until = phases[at + 1]?.[1] ?? end, left = Math.max((from - edge) / span, 0), right = Math.min((until - edge) / span, 1);
    return right <= 0 ? null : el("i", { class: PHASES[name] || "prepare", title: `${name} ${duration(until - from)}`, style: { left: `${100 * left}%`, width: `${100 * (right - left)}%` } });
  });
  const mark = isBad && end > edge && end < edge + span - 1 ? el("i", { class: "late", style: { left: `calc(${100 * Math.min((end - edge) / span, 1)}% - 4px)`, width: "4px" } }) : null;
  return el("div", { class: "track", "aria-hidden": "true" }, ...parts, mark);
}

// -- the panels -------------------------------------------------------------------------------------------------------

function drawStarts(starts) {
  if (!starts.length) return fill($("starts"), el("p", { class: "empty" }, "No machine was started in the last 24 hours."));
  const values = starts.flatMap(path => path.spread.map(([value]) => value));
  const low = Math.floor(Math.log10(Math.max(Math.min(...values), .01)) * 2) / 2, high = Math.ceil(Math.log10(Math.max(...values, .02)) * 2 + .01) / 2;
  const place = value => Math.min(Math.floor((Math.log10(Math.max(value, .01)) - low) / (high - low) * 48), 47);
  const words = { clone: "Clone of a template", cold: "Cold boot", template: "Template made first" };
  const scale = [0, .25, .5, .75, 1].map(at => el("small", {}, seconds(+(10 ** (low + at * (high - low))).toPrecision(2))));
  fill($("starts"), ...starts.map(path => {
    const bins = Array(48).fill(0);
    for (const [value, count] of path.spread) bins[place(value)] += count;
    const most = Math.max(...bins);
    return el("div", { class: "start" },
      el("div", { class: "top" }, el("b", {}, words[path.path] || path.path, el("small", {}, ` ${path.count.toLocaleString("en")}`)),
        ...PERCENTILES.map(name => el("span", {}, el("small", {}, name), seconds(path[name])))),
      el("div", { class: "columns", "aria-hidden": "true" }, ...bins.map(count => el("i", { style: { height: `${count ? Math.max(100 * Math.sqrt(count / most), 6) : 0}%` } }))));
  }), el("div", { class: "scale", "aria-hidden": "true" }, ...scale));
}

function drawCauses(causes) {
  if (!causes.length) return fill($("causes"), el("p", { class: "empty" }, "Nothing failed in the last 24 hours."));
  fill($("causes"), ...causes.map(failures => el("div", { class: "failure" },
    el("b", {}, failures.count.toLocaleString("en")),
    el("div", {}, failures.cause, el("small", {}, ` last at ${clock(failures.last)} `),
      failures.machine ? el("button", { type: "button", class: "plain", "data-key": `cause ${failures.machine}`, onclick: () => openStory(failures.machine, failures.node) }, failures.machine) : null),
    el("div", { class: "soft" }, failures.reason || ""),
    el("div", { class: "do" }, ...marked(failures.hint || "See the story of the last one.")))));
}

function drawUsers(users) {
  $("users-panel").hidden = false;
  const most = Math.max(1, ...users.map(user => user.cpu_seconds));
  fill($("users"), users.length ? table(["User", "*Now", "*Cpus", "*Ended", "*Failed", "", "*Cpu time"], users.slice(0, 50).map(user => [
    el("span", { class: "cut" }, user.user), user.live, user.cpus, user.machines.toLocaleString("en"), user.failed || "",
    meter(user.cpu_seconds / most), hours(user.cpu_seconds)])) : el("p", { class: "empty" }, "Nobody has used a machine in the last 24 hours."));
}

function drawNodes(nodes) {
  $("nodes-panel").hidden = nodes.length < 2;
  fill($("nodes"), table(["Node", "State", "*Now", "*Ended", "*Failed"], nodes.map(node => [
    node.node, el("span", { class: `state ${node.why ? "bad" : "run"}`, title: node.why }, node.why ? `silent${node.heard ? ` since ${clock(node.heard)}` : ""}: ${node.why}` : node.node === state.sections.about?.node ? "this host" : node.heard ? "answers" : "by its ledger"),
    node.live, node.machines.toLocaleString("en"), node.failed || ""])));
}

function drawModes(modes) {
  const titles = { vacuum: "Vacuum", bait: "Bait", lease: "Leases" };
  fill($("modes"), ...modes.map(mode => {
    const most = Math.max(1, ...mode.bars.map(([, value, target]) => Math.max(value, target ?? 0)));
    const late = mode.at && now() - mode.at > 3600;
    return el("section", { class: "panel" },
      el("div", { class: "head" }, el("h2", {}, titles[mode.kind] || mode.kind), el("small", {}, mode.name), el("span", { class: `state ${late || mode.state === "closed" ? "bad" : "run"}` }, late ? `silent since ${clock(mode.at)}` : mode.state)),
      mode.why ? el("p", { class: "why" }, mode.why) : null,
      mode.bars.length ? table(["", "", `*${mode.unit}`], mode.bars.map(([name, value, target, why]) => [
        el("span", { title: why }, name, why ? el("br") : null, el("small", {}, why)), meter(value / most, target == null ? null : target / most),
        `${+value.toFixed(1)}${target == null ? "" : ` of ${+target.toFixed(1)}`}`])) : el("p", { class: "empty" }, "Nothing runs."));
  }));
}

function meter(share, target = null) {
  return el("div", { class: "meter", "aria-hidden": "true" }, el("i", { style: { width: `${100 * share}%` } }), target == null ? null : el("u", { style: { left: `${100 * target}%` } }));
}

function table(heads, rows) {
  const isNumber = heads.map(head => head.startsWith("*")), last = heads.length - 1;
  const kind = at => isNumber[at] || (at === last && rows.length && typeof rows[0][at] === "string") ? "num" : "";
  return el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head, at) => el("th", { scope: "col", class: kind(at) }, head.replace("*", ""))))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((cell, at) => el("td", { class: cell.className === "meter" ? "has-meter" : kind(at) }, typeof cell === "object" ? cell : String(cell)))))));
}

// -- one machine ------------------------------------------------------------------------------------------------------

async function openStory(id, node) {
  $("story-title").textContent = `Machine ${id}`;
  fill($("story-body"), el("p", { class: "empty" }, "reading…"));
  if (!$("story").open) $("story").showModal();
  const own = !node || node === state.sections.about?.node;
  try {
    const answer = await fetch(`/api/machines/${encodeURIComponent(id)}${own ? "" : `?node=${encodeURIComponent(node)}`}`, { headers: headers() });
    if (!answer.ok) throw new Error(answer.status === 404 ? "Its records are not kept on this host any more, or its user keeps them." : await answer.text());
    tellStory(await answer.json());
  } catch (error) {
    fill($("story-body"), el("p", { class: "why" }, error.message));
  }
}

function tellStory({ request, outcome, events, console: tail }) {
  const asked = request.machine || {}, known = outcome || {}, states = events.filter(event => event.event === "state");
  const soFar = states.map((event, at) => [event.state, (states[at + 1]?.time ?? now()) - event.time]).filter(([name]) => name !== "done");
  const phases = known.phases ? Object.entries(known.phases) : soFar, most = Math.max(...phases.map(([, spent]) => spent), .001);
  const facts = {
    Name: request.name, User: known.account || request.work?.payload?.account?.name, Requester: request.requester, Image: asked.image, "Started as": [known.start, known.accelerator].filter(Boolean).join(", "),
    Cpus: asked.cpus, Memory: asked.memory && size(asked.memory), Network: asked.network, Created: request.created && new Date(request.created * 1000).toLocaleString(),
    Result: known.cause && [known.cause, known.exit_code != null ? `exit ${known.exit_code}` : known.signal != null ? `signal ${known.signal}` : ""].filter(Boolean).join(", "),
  };
  const journal = events.map(event => {
    const { time, event: what, state: phase, ...rest } = event;
    const more = Object.entries(rest).filter(([, value]) => value !== "" && value != null).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
    return `${clock(time)}.${String(Math.floor(time % 1 * 1000)).padStart(3, "0")}  ${(what === "state" ? phase : what).padEnd(14)} ${more}`;
  });
  fill($("story-body"),
    known.cause && known.cause !== "finished" ? el("div", { class: "why" }, el("div", {}, known.reason || known.cause), known.hint ? el("div", {}, "→ ", ...marked(known.hint)) : null) : null,
    el("dl", { class: "facts" }, ...Object.entries(facts).filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    phases.length ? el("h3", {}, "Seconds per phase") : null,
    ...phases.map(([name, spent]) => el("div", { class: "phase" }, name, el("div", { class: "track" }, el("i", { class: PHASES[name] || "prepare", style: { left: "0", width: `${100 * spent / most}%` } })), el("span", { class: "num" }, spent.toFixed(3)))),
    el("h3", {}, "Console, the end of it"), el("pre", { tabindex: "0" }, tail || "(nothing was written)"),
    el("h3", {}, "Journal"), el("pre", { tabindex: "0" }, journal.join("\n")));
}

// -- token, theme, keys -----------------------------------------------------------------------------------------------

function askToken(problem = "") {
  $("token-error").textContent = problem;
  $("token-value").value = "";
  if (!$("token").open) $("token").showModal();
}

function toggleToken() {
  if (!state.token) return askToken();
  setToken("");
  reconnect();
}

function toggleTheme() {
  const root = document.documentElement, isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (isDark ? "dark" : "light")) === "dark" ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

function move(step) {
  const buttons = [...$("machines").querySelectorAll("button.plain")], at = buttons.indexOf(document.activeElement);
  buttons[Math.min(Math.max(at + step, 0), buttons.length - 1)]?.focus();
}

const KEYS = {
  "/": () => $("filter").focus(), j: () => move(1), k: () => move(-1), l: toggleToken, t: toggleTheme, "?": () => $("help").showModal(),
  w: () => { $("window").selectedIndex = ($("window").selectedIndex + 1) % $("window").length; drawMachines(); },
};

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && document.activeElement === $("filter")) { $("filter").value = ""; $("filter").blur(); drawMachines(); }
  const isTyping = event.target.matches?.("input, select, textarea") || document.querySelector("dialog[open]");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
$("token").addEventListener("close", () => {
  if ($("token").returnValue === "ok" && $("token-value").value.trim()) { setToken($("token-value").value.trim()); reconnect(); }
});
$("token-cancel").addEventListener("click", () => $("token").close("cancel"));
$("filter").addEventListener("input", drawMachines);
$("window").addEventListener("change", drawMachines);
$("unlock").addEventListener("click", toggleToken);
$("theme").addEventListener("click", toggleTheme);
$("keys").addEventListener("click", () => $("help").showModal());
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close("cancel"); });

document.documentElement.dataset.theme = localStorage.getItem("theme") || "";
const given = new URLSearchParams(location.hash.slice(1));  // #token=...&machine=ID
if (given.get("token")) history.replaceState(null, "", location.pathname);
setToken(given.get("token") || sessionStorage.getItem("token") || "");
if (given.get("machine")) openStory(given.get("machine"), "");
setInterval(() => { if (state.isLive) drawMachines(); }, 1000);  // time goes on, though nothing happens
listen();
