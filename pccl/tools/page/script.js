"use strict";
// Draws what page.json says, once a second. Texts of peers only ever become text nodes.
(() => {
  const HELD = 2; // seconds that a call waits for a member until the member is marked
  const BEHIND = 64; // entries of the log; a healthy member has not applied a few yet
  const LATE = 10; // seconds that a call waits for a member until that is trouble
  const MATRIX = 32; // members of a group whose links are drawn as a matrix
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  let paused = false;
  let answered = 0; // when the last answer came; 0: never

  // An element with that class and these children; null and "" are left out.
  function make(tag, name, ...children) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    for (const child of children.flat()) if (child !== null && child !== "") made.append(child);
    return made;
  }
  function put(where, ...children) {
    where.replaceChildren(...children.flat().filter((child) => child !== null));
  }

  function duration(seconds) {
    if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole} s`;
    const parts = (big, unit, small, below) => {
      const rest = Math.floor((whole % big) / small);
      return `${Math.floor(whole / big)} ${unit}` + (rest ? ` ${rest} ${below}` : "");
    };
    if (whole < 3600) return parts(60, "min", 1, "s");
    if (whole < 86400) return parts(3600, "h", 60, "min");
    return parts(86400, "d", 3600, "h");
  }
  function size(bytes) {
    const units = [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    for (const [unit, scale] of units) {
      if (bytes >= scale) return `${+(bytes / scale).toPrecision(3)} ${unit}`;
    }
    return `${Math.round(bytes)} B`;
  }
  // Limits and segments, which are powers of two: 512 KiB.
  function binary(bytes) {
    for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (bytes >= scale) return `${+(bytes / scale).toPrecision(3)} ${unit}`;
    }
    return `${bytes} B`;
  }
  const rate = (bytes) => (bytes === null ? "-" : `${size(bytes)}/s`);
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

  const nameOf = (group, rank) => {
    const found = group.members.find((member) => member.rank === rank);
    return found ? found.name : `rank ${rank}`;
  };

  function facts(status) {
    const known = [
      ["master", status.software],
      ["up", duration(status.seconds)],
      ["term", `${status.term}`],
      ["evicted", `${status.evictions}`],
      ["traffic", status.encrypted ? "encrypted" : "not encrypted"],
      ["relay", status.relays ? "on" : "off"],
      ["admission", status.admission_paused ? "paused" : "open"],
    ];
    put($("facts"), known.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
  }

  // A chart of one row of numbers, the latest on the right.
  function chart(title, points, now, format) {
    const shape = (tag, name, attributes) => {
      const made = document.createElementNS(SVG, tag);
      made.setAttribute("class", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      return made;
    };
    const most = Math.max(...points.map(([, value]) => value), 1e-9);
    const span = Math.max(60, ...points.map(([ago]) => ago));
    const at = points.map(([ago, value]) => [(1 - ago / span) * 300, 66 - (value / most) * 60]);
    const path = at.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" L");
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 300 70");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    const text = `${title} over ${duration(span)}: now ${now}, at most ${format(most < 1e-6 ? 0 : most)}`;
    svg.setAttribute("aria-label", text);
    svg.append(shape("line", "base", { x1: 0, x2: 300, y1: 67, y2: 67 }));
    if (at.length > 1) {
      svg.append(shape("path", "area", { d: `M${at[0][0]},67 L${path} L${at[at.length - 1][0]},67 Z` }));
      svg.append(shape("path", "line", { d: `M${path}` }));
    }
    const scale = `${duration(span)}, at most ${format(most < 1e-6 ? 0 : most)}`;
    return make("figure", "", make("figcaption", "", make("span", "", `${title} `, make("b", "", now)), scale), svg);
  }

  function strip(history) {
    const last = history.length ? history[history.length - 1] : null;
    const rows = [
      ["Operations/s", 2, (value) => `${+value.toPrecision(3)}`],
      ["Reduced", 3, rate],
      ["Members", 1, (value) => `${value}`],
    ];
    put($("strip").querySelector(".charts"), rows.map(([title, at, format]) =>
      chart(title, history.map((row) => [row[0], row[at]]), last ? format(last[at]) : "-", format)));
  }

  // A table with headings. Columns: [heading, class]; rows: {bad, cells}.
  function table(label, columns, rows, name = "cards") {
    const made = make("table", name);
    made.setAttribute("role", "table"); // said again, since cards change its display
    made.setAttribute("aria-label", label);
    const head = make("tr", "", columns.map(([title, kind]) => {
      const cell = make("th", kind === "number" ? kind : "word", title);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      return cell;
    }));
    head.setAttribute("role", "row");
    made.append(make("thead", "", head));
    const body = make("tbody", "");
    for (const { bad, cells } of rows) {
      const row = make("tr", bad ? "bad" : "");
      row.setAttribute("role", "row");
      cells.forEach((cell, i) => {
        const [title, kind] = columns[i];
        const made = make(i === 0 ? "th" : "td", kind, cell);
        if (i === 0) made.scope = "row";
        made.setAttribute("role", i === 0 ? "rowheader" : "cell");
        made.dataset.label = title;
        row.append(made);
      });
      body.append(row);
    }
    made.append(body);
    return make("div", "scroll", made);
  }

  function members(group) {
    const columns = [
      ["member", "word name"], ["rank", "number"], ["address", "word wide"], ["since", "number"],
      ["heard", "number"], ["ops/s", "number"], ["reduced/s", "number"], ["sent", "number"],
      ["received", "number"], ["state", "word state"],
    ];
    const rows = group.members.map((member) => {
      const held = group.calls.filter((call) =>
        call.seconds >= HELD && call.entered.length && call.missing.includes(member.rank));
      const marks = member.waits.map((wait) => make("span", "mark", `in ${wait.call}, ${duration(wait.seconds)}`));
      for (const call of held) {
        const text = `${count(call.entered.length, "member")} waiting for it in ${call.call}, ${duration(call.seconds)}`;
        marks.push(make("span", "mark bad", text));
      }
      if (!member.connected) marks.push(make("span", "mark bad", "not connected"));
      if (member.draining) marks.push(make("span", "mark warn", "draining"));
      if (member.behind >= BEHIND) marks.push(make("span", "mark warn", `${member.behind} log entries behind`));
      if (member.replica) marks.push(make("span", "mark", `replica ${member.replica}`));
      const rateOf = member.operations_per_s;
      return {
        bad: !member.connected || held.length > 0,
        cells: [
          member.name, `${member.rank}`,
          [member.address, make("span", "small", ` host ${member.host}`)],
          duration(member.seconds), duration(member.heard_seconds),
          rateOf === null ? "-" : rateOf.toFixed(1), rate(member.reduced_bytes_per_s),
          size(member.sent_bytes), size(member.received_bytes), marks,
        ],
      };
    });
    return table(`Members of group ${group.group}`, columns, rows);
  }

  function newcomers(group) {
    const why = {
      joined: "its program has made no collective call yet",
      asks: "waits for the group's start",
      connects: "connects to the members",
      ready: "enters at the next admission point",
    };
    const rows = group.newcomers.map((one) => ({
      bad: one.without.length > 0,
      cells: [one.name, one.address, duration(one.seconds),
        one.without.length ? `cannot reach ${one.without.join(", ")}` : why[one.state] || one.state],
    }));
    const columns = [["newcomer", "word name"], ["address", "word wide"], ["since", "number"], ["why it waits", "word state"]];
    return table(`Newcomers of group ${group.group}`, columns, rows);
  }

  function calls(group) {
    return make("ul", "plain calls", group.calls.map((call) => {
      const all = call.entered.length + call.missing.length;
      const late = call.missing.length > 0 && call.seconds >= LATE;
      const names = call.missing.slice(0, 8).map((rank) => nameOf(group, rank)).join(", ");
      const more = call.missing.length > 8 ? ` and ${call.missing.length - 8} more` : "";
      return make("li", "",
        make("b", "", call.call), call.what ? make("span", "small", ` ${call.what}`) : "",
        `: ${call.entered.length} of ${all} in, open for ${duration(call.seconds)}`,
        call.missing.length ? make("span", late ? "late" : "", `; waiting for ${names}${more}`) : "");
    }));
  }

  const SHORT = { relayed: "relayed", avoided: "avoided", unreachable: "no path", silent: "silent", broken: "broken" };
  const isBad = (state) => state === "unreachable" || state === "silent" || state === "broken";
  const reason = (group, link) => {
    const why = link.reason ? `: ${link.reason}` : "";
    return `${nameOf(group, link.from)} to ${nameOf(group, link.to)} is ${link.state}${why}`;
  };

  function links(group) {
    const known = new Map(group.links.map((link) => [`${link.from} ${link.to}`, link]));
    const notes = group.links.filter((link) => link.state !== "ok")
      .map((link) => make("li", isBad(link.state) ? "late" : "", reason(group, link)));
    const list = notes.length ? make("ul", "plain", notes.slice(0, 40)) : null;
    if (!group.links.length) {
      return [make("p", "small", "Nothing is known yet: rates are measured while large arrays move between hosts.")];
    }
    if (group.members.length > MATRIX) {
      const text = `${group.members.length} members: too many for a matrix. status.json has all links.`;
      return [make("p", "small", text), list];
    }
    const most = Math.max(...group.links.map((link) => link.bytes_per_s || 0), 1);
    const made = make("table", "matrix");
    const corner = make("th", "word", "from \\ to rank");
    corner.scope = "col";
    made.append(make("thead", "", make("tr", "", corner, group.members.map((to) => {
      const cell = make("th", "", `${to.rank}`);
      cell.scope = "col";
      cell.title = to.name;
      cell.setAttribute("aria-label", `to rank ${to.rank}, ${to.name}`);
      return cell;
    }))));
    made.append(make("tbody", "", group.members.map((from) => {
      const head = make("th", "word", `${from.rank} `, make("span", "small", from.name));
      head.scope = "row";
      return make("tr", "", head, group.members.map((to) => {
        if (to.rank === from.rank) return make("td", "self", "");
        const link = known.get(`${from.rank} ${to.rank}`);
        if (!link) return make("td", "", "-");
        const trip = link.rtt_seconds;
        const delay = trip === null ? "" : `${+(trip * 1e3).toPrecision(3)} ms`;
        const state = SHORT[link.state] || (link.state === "ok" ? "" : link.state);
        const kind = isBad(link.state) ? "bad" : link.state === "ok" ? "" : "warn";
        const speed = link.bytes_per_s === null ? "" : rate(link.bytes_per_s);
        const under = [speed && state ? state : "", delay].filter(Boolean).join(", ");
        const cell = make("td", kind, speed || state || (delay ? "" : "-"), under ? make("span", "small", under) : "");
        if (link.bytes_per_s !== null) cell.style.setProperty("--heat", (0.06 + 0.34 * (link.bytes_per_s / most)).toFixed(3));
        cell.title = reason(group, link);
        return cell;
      }));
    })));
    const frame = make("div", "scroll", made);
    frame.tabIndex = 0; // can be scrolled with the keyboard
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", `Rates of the links of group ${group.group}`);
    return [frame, list];
  }

  function plan(group) {
    const classes = group.plan.classes.map((each) =>
      each.max_bytes === null ? `${each.kind} for all larger ones` : `${each.kind} up to ${binary(each.max_bytes)}`);
    return [
      classes.length ? make("p", "", `Operations: ${classes.join(", ")}. Segments of ${binary(group.plan.segment_bytes)}.`) : null,
      group.plan.why ? make("p", "small", group.plan.why) : null,
    ];
  }

  // The section of a group, made once, so that scroll positions stay.
  function sectionOf(number) {
    const id = `group-${number}`;
    let section = $(id);
    if (!section) {
      section = make("section", "");
      section.id = id;
      const title = make("h2", "");
      title.id = `${id}-title`;
      section.setAttribute("aria-labelledby", title.id);
      section.append(title, make("p", "small head"));
      for (const slot of ["members", "newcomers", "calls", "links", "plan"]) section.append(make("div", slot));
      $("groups").append(section);
    }
    return section;
  }

  function drawGroup(group) {
    const section = sectionOf(group.group);
    const slot = (name, title, content) => {
      const where = section.querySelector(`:scope > .${name}`);
      const kept = where.querySelector(".scroll"); // e.g. the matrix, scrolled to the right
      const left = kept ? kept.scrollLeft : 0;
      const focused = kept !== null && document.activeElement === kept;
      put(where, content.length ? [make("h3", "", title), ...content] : []);
      const now = where.querySelector(".scroll");
      if (now && left) now.scrollLeft = left;
      if (now && focused) now.focus({ preventScroll: true });
    };
    put(section.querySelector("h2"), `Group ${group.group}`);
    const started = group.epoch > 0;
    put(section.querySelector(".head"), started
      ? `${count(group.members.length, "member")}, at least ${group.min_peers}. Epoch ${group.epoch} began ` +
        `${duration(group.epoch_seconds)} ago (${group.cause}). ${group.operations} operations, ${group.aborted} aborted.` +
        (group.followers.length ? ` Followed by ${group.followers.join(", ")}.` : "")
      : `Not started: ${count(group.missing, "peer")} missing, at least ${group.min_peers} needed.`);
    slot("members", "Members", group.members.length ? [members(group)] : []);
    slot("newcomers", "Newcomers", group.newcomers.length ? [newcomers(group)] : []);
    slot("calls", "Open calls", group.calls.length ? [calls(group)] : []);
    slot("links", "Links", group.members.length > 1 ? links(group) : []);
    slot("plan", "Plan", group.plan.classes.length || group.plan.why ? plan(group) : []);
  }

  function events(status) {
    const list = $("events").querySelector("ol");
    put(list, status.events.slice().reverse().map((event) => {
      const of = event.group !== null && status.groups.length > 1 ? `group ${event.group}: ` : "";
      return make("li", event.level === "warn" ? "warn" : "",
        make("time", "", `${duration(event.seconds_ago)} ago`), make("span", "", of + event.text));
    }));
    list.tabIndex = 0;
    list.setAttribute("aria-label", "Events, the latest first");
  }

  // The verdict is a live region: it changes only when its words do.
  function verdict(text, kind) {
    const where = $("verdict");
    if (where.textContent !== text) where.textContent = text;
    where.className = kind;
  }

  function draw(page) {
    const status = page.status;
    document.title = `${page.troubles.length ? `(${page.troubles.length}) ` : ""}pccl ${status.run}`;
    put($("run"), status.run);
    const wrong = page.troubles.length;
    verdict(wrong ? `${count(wrong, "thing")} to look at` : status.groups.length ? "All is well" : "Nobody has joined yet",
      wrong ? "bad" : "good");
    $("troubles").hidden = !wrong;
    put($("troubles").querySelector("ul"), page.troubles.map((text) => make("li", "", text)));
    facts(status);
    strip(page.history);
    const kept = new Set(status.groups.map((group) => `group-${group.group}`));
    for (const section of [...$("groups").children]) if (!kept.has(section.id)) section.remove();
    status.groups.forEach(drawGroup);
    events(status);
  }

  async function refresh() {
    if (!paused && !document.hidden) {
      try {
        const answer = await fetch(`page.json${location.search}`, { cache: "no-store", signal: AbortSignal.timeout(8000) });
        if (!answer.ok) throw new Error((await answer.text()).trim());
        draw(await answer.json());
        answered = Date.now();
      } catch (error) {
        const old = answered ? `; this is from ${duration((Date.now() - answered) / 1000)} ago` : "";
        const why = error instanceof TypeError || error.name === "TimeoutError" ? "The master does not answer" : error.message;
        verdict(`${why}${old}`, "bad");
      }
    }
    setTimeout(refresh, 1000);
  }

  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", `${paused}`);
    $("pause").textContent = paused ? "Go on" : "Pause";
  });
  for (const link of document.querySelectorAll("footer a")) link.search = location.search;
  refresh();
})();
