"use strict";
// The page reads without this script. It adds: a cursor in each figure, the tables of a chosen block,
// copying, downloads, and the switch between light and dark. Text goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // --- light and dark
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // --- commands
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {  // a page from disk may not: let the browser copy what is selected
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // --- the chosen block
  const panel = document.getElementById("chosen");
  const names = Object.keys(data.blocks);
  const makeTable = (content) => {
    const table = make("table", null, { class: content.names ? "names" : "" });
    table.append(make("caption", content.caption));
    const head = make("tr");
    content.titles.forEach((title, n) => {
      const kind = content.words[n] ? "" : "figure";
      head.append(make("th", title, { scope: "col", class: kind, title: content.meanings[n] }));
    });
    const body = make("tbody");
    content.rows.forEach((row, number) => {
      const mark = content.marks[number] || "";
      const line = make("tr", null, { class: mark });
      row.forEach((cell, n) => {
        const place = n === 0 ? make("th", cell, { scope: "row" }) : make("td", cell);
        if (!content.words[n]) place.className = "figure";
        if (n === 0 && mark) {
          const word = mark === "onset" ? "begins here" : "beyond its limit";
          place.append(make("span", word, { class: "mark" }));
        }
        line.append(place);
      });
      body.append(line);
    });
    const top = make("thead");
    top.append(head);
    table.append(top, body);
    const wide = make("div", null, {
      class: "scroll", tabindex: "0", role: "group", "aria-label": content.caption,
    });
    wide.append(table);
    return wide;
  };
  let chosen = null;
  const choose = (name, { move = false } = {}) => {
    if (!panel || !Object.hasOwn(data.blocks, name)) return;
    const block = data.blocks[name];
    chosen = name;
    const at = names.indexOf(name);
    const heading = make("h3", name, { id: "chosen-title", tabindex: "-1" });
    const list = make("select", null, { "aria-label": data.noun });
    names.forEach((one) => list.append(make("option", one)));
    list.selectedIndex = at;
    list.addEventListener("change", () => {
      choose(names[list.selectedIndex]);
      panel.querySelector("select").focus();
    });
    const step = (label, to, sign) => {
      const button = make("button", sign, { type: "button", "aria-label": label });
      button.disabled = to < 0 || to >= names.length;
      button.addEventListener("click", () => {
        choose(names[to]);
        [...panel.querySelectorAll("button")].find((b) => b.textContent === sign)?.focus();
      });
      return button;
    };
    const bar = make("div", null, { class: "bar" });
    bar.append(step(`${data.noun} before`, at - 1, "‹"), list, step(`${data.noun} after`, at + 1, "›"));
    const facts = make("dl", null, { class: "facts" });
    for (const [term, what] of block.facts) {
      const pair = make("div");
      pair.append(make("dt", term), make("dd", what));
      facts.append(pair);
    }
    const parts = [];
    for (const table of block.tables) {
      parts.push(makeTable(table));
      if (table.note) parts.push(make("p", table.note, { class: "note" }));
    }
    const top = make("div", null, { class: "chosen-head" });
    top.append(heading, bar);
    panel.replaceChildren(top, facts, ...parts);
    panel.hidden = false;
    for (const stage of stages) stage.mark(name);
    if (move) {
      panel.scrollIntoView({ block: "nearest" });
      heading.focus({ preventScroll: true });
    }
  };

  // --- figures: a cursor by mouse, touch and keyboard; what it stands on is said below
  const say = (figure, row, column) => {
    if (figure.kind === "line") return figure.says[column];
    const value = figure.values[row][column];
    const amount = value === null ? "nothing was compared" : `${value} ${figure.unit}`;
    return `${figure.rows[row]}, ${figure.column} ${figure.columns[column]}: ${amount}`;
  };
  const stages = [];
  for (const element of document.querySelectorAll(".stage")) {
    const figure = data.figures[element.dataset.figure];
    if (!figure) continue;
    const heat = figure.kind === "heat";
    const rows = heat ? figure.rows.length : 1;
    const columns = heat ? figure.columns.length : figure.says.length;
    const title = element.parentElement.querySelector("strong").textContent;
    const picture = element.querySelector(".area svg");
    const cursor = make("div", null, { class: "cursor" });
    const held = make("div", null, { class: "held" });
    const hint = stages.length ? "" : "Point at a figure, or use the arrow keys; Enter opens what it stands on.";
    const readout = make("output", hint, { class: "readout" });
    const surface = make("div", null, heat
      ? { class: "surface", tabindex: "0", role: "application", "aria-label": `${title}: arrow keys move` }
      : { class: "surface", tabindex: "0", role: "slider", "aria-label": `${data.noun} in: ${title}`,
          "aria-valuemin": "0", "aria-valuemax": String(columns - 1), "aria-valuenow": "0" });
    surface.append(held, cursor);
    element.append(surface);
    element.after(readout);
    surface.style.height = `${picture.getAttribute("height")}px`;
    let at = [0, 0];
    const place = (box, row, column, high = 1) => {
      box.style.left = `${(100 * column) / columns}%`;
      box.style.width = `${100 / columns}%`;
      box.style.top = `${(100 * row) / rows}%`;
      box.style.height = `${(100 * high) / rows}%`;
    };
    const go = (row, column) => {
      at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
      place(cursor, ...at);
      cursor.classList.add("on");
      const text = say(figure, ...at);
      readout.textContent = text;
      if (!heat) {
        surface.setAttribute("aria-valuenow", String(at[1]));
        surface.setAttribute("aria-valuetext", text);
      }
    };
    const blockAt = () => figure.blocks[heat ? at[0] : at[1]];
    surface.addEventListener("pointermove", (event) => {
      const box = surface.getBoundingClientRect();
      go(Math.floor((rows * (event.clientY - box.top)) / box.height),
        Math.floor((columns * (event.clientX - box.left)) / box.width));
    });
    surface.addEventListener("pointerleave", () => cursor.classList.toggle("on",
      document.activeElement === surface));
    surface.addEventListener("click", () => choose(blockAt()));
    surface.addEventListener("focus", () => go(...at));
    surface.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        Home: [0, -columns], End: [0, columns] };
      const move = moves[event.key];
      if (move) {
        const sideways = heat ? move : [0, move[1] || -move[0]];
        go(at[0] + sideways[0], at[1] + sideways[1]);
      } else if (event.key === "Enter" || event.key === " ") {
        choose(blockAt(), { move: true });
      } else {
        return;
      }
      event.preventDefault();
    });
    stages.push({
      mark(name) {
        const index = figure.blocks.indexOf(name);
        held.classList.toggle("on", index >= 0);
        if (index < 0) return;
        if (heat) {
          place(held, index, 0);
          held.style.width = "100%";
          at = [index, at[1]];
        } else {
          place(held, 0, index);
          at = [0, index];
          surface.setAttribute("aria-valuenow", String(index));
          surface.setAttribute("aria-valuetext", say(figure, 0, index));
        }
      },
    });
  }
  for (const cell of document.querySelectorAll("#blocks .names tbody th, #runs .names tbody th")) {
    const name = cell.firstChild;
    if (name.nodeType !== Node.TEXT_NODE || !Object.hasOwn(data.blocks, name.textContent)) continue;
    const button = make("button", name.textContent, { type: "button", class: "plain" });
    button.addEventListener("click", () => choose(name.textContent, { move: true }));
    name.replaceWith(button);
  }
  if (data.chosen) choose(data.chosen);

  // --- the report for download
  const unpacked = async () => {
    const text = atob(document.getElementById("attachment").textContent);
    const bytes = Uint8Array.from(text, (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "boolean" ? (value ? "True" : "False") : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const flat = (site) => {
    const row = {};
    for (const [name, value] of Object.entries(site)) {
      if (Array.isArray(value)) {
        row[name] = value.join(name === "shape" ? "x" : " ");
      } else if (value !== null && typeof value === "object") {
        for (const [key, inner] of Object.entries(value)) row[`${name}_${key}`] = inner;
      } else {
        row[name] = value;
      }
    }
    return row;
  };
  const table = (report) => {
    const lines = report.sites.map(flat).map((row) => data.columns.map((key) => quoted(row[key])));
    return `${[data.columns, ...lines].map((cells) => cells.join(",")).join("\n")}\n`;
  };
  const save = (text, name, type) => {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = make("a", null, { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  const downloads = document.getElementById("downloads");
  if (downloads && typeof DecompressionStream === "function") {
    downloads.hidden = false;
    document.getElementById("download-json").addEventListener("click", async () => {
      save(await unpacked(), "report.json", "application/json");
    });
    document.getElementById("download-csv")?.addEventListener("click", async () => {
      save(table(JSON.parse(await unpacked())), "report.csv", "text/csv");
    });
  }

  // --- print all that is folded
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details.more:not([open])")];
    for (const one of folded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
  });
})();
