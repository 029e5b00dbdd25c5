// Markdown as a tree of texts and {tag, children, href, start}. Tags and the schemes of links come from fixed lists, and
// what is not understood is text: an answer can be anything.

const DEPTH = 8; // of lists, quotations and emphasis within each other; what is deeper is text
const SCHEMES = ["http:", "https:", "mailto:"];
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|\t|$)/;
const DIVIDER = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
// Spans have a maximum length, so that the time for an answer with many unmatched delimiters grows only linearly.
const SPANS = [
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<!`)(?<ticks>`{1,8})(?!`)(?<code>[^]{1,2000}?)(?<!`)\k<ticks>(?!`)/,
  /(?<!\*)(?<stars>\*{1,3})(?![\s*])(?<starred>[^]{0,2000}?[^\s*])\k<stars>(?!\*)/,
  /(?<![\w_])(?<lines>_{1,3})(?![\s_])(?<lined>[^]{0,2000}?[^\s_])\k<lines>(?![\w_])/, // not within snake_case
  /~~(?=\S)(?<struck>[^]{0,2000}?\S)~~/,
  /!?\[(?<label>[^[\]]{1,500})\]\((?<target>(?:[^\s()]|\([^\s()]{0,200}\)){1,2000})(?: +"[^"]{0,500}")?\)/,
  /(?<url>https?:\/\/[^\s<>"]{0,2000}[^\s<>".,;:!?)\]'*_~`])/,
];
const SPAN = new RegExp(SPANS.map(({ source }) => source).join("|"), "g");

// Returns the blocks of a text.
export function markdown(text, depth = 0) {
  const lines = text.split(/\r?\n/);
  const blocks = [];
  let at = 0;
  const take = (belongs) => {
    const start = at;
    while (at < lines.length && belongs(lines[at])) at++;
    return lines.slice(start, at);
  };
  const inner = (nested) => markdown(nested.join("\n"), depth + 1);
  const kind = () => kindOf(lines[at], lines[at + 1] ?? "", depth);
  const readers = {
    blank: () => { at++; },
    text: () => {
      const start = at++;
      while (at < lines.length && kind() === "text") at++;
      return { tag: "p", children: spans(lines.slice(start, at).join("\n").trim()) };
    },
    rule: () => {
      at++;
      return { tag: "hr", children: [] };
    },
    heading: () => {
      const [, { length }, title] = lines[at++].match(HEADING);
      return { tag: `h${Math.min(length + 1, 6)}`, children: spans(title.trim().replace(/(^|\s)#+$/, "")) };
    },
    fence: () => {
      const [, mark] = lines[at++].match(FENCE);
      const code = take((line) => {
        const [, own, info] = line.match(FENCE) ?? [];
        return !own?.startsWith(mark) || info.trim();
      });
      at++;
      return { tag: "pre", children: [code.join("\n")] };
    },
    quote: () => ({
      tag: "blockquote",
      children: inner(take((line) => QUOTE.test(line)).map((line) => line.replace(QUOTE, ""))),
    }),
    item: () => {
      const [{ length }, indent, mark] = lines[at].match(ITEM);
      const first = lines[at++].slice(length);
      // Models indent the inside of an item by two to four spaces, whatever the width of its number.
      const rest = take((line) => !line.trim() || /^( {2}|\t)/.test(line.slice(indent.length)));
      const outdent = new RegExp(`^ {0,${length}}`);
      const parts = inner([first, ...rest.map((line) => line.replace(/\t/g, "    ").replace(outdent, ""))]);
      const item = { tag: "li", children: parts.flatMap((part, i) => (i || part.tag !== "p" ? [part] : part.children)) };
      const tag = mark.length > 1 ? "ol" : "ul";
      if (blocks.at(-1)?.tag !== tag) return { tag, children: [item], ...(tag === "ol" && { start: parseInt(mark) }) };
      blocks.at(-1).children.push(item);
    },
    table: () => {
      const [head, , ...rows] = take((line) => line.includes("|"));
      const row = (line, tag) => ({ tag: "tr", children: cells(line).map((cell) => ({ tag, children: spans(cell) })) });
      return { tag: "table", children: [row(head, "th"), ...rows.map((line) => row(line, "td"))] };
    },
  };
  while (at < lines.length) blocks.push(...[readers[kind()]()].filter(Boolean));
  return blocks;
}

// Returns what a line begins.
function kindOf(line, next, depth) {
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (depth < DEPTH && QUOTE.test(line)) return "quote";
  if (depth < DEPTH && ITEM.test(line)) return "item";
  return line.includes("|") && DIVIDER.test(next) ? "table" : "text";
}

function cells(row) {
  const inner = row.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// Returns the texts, links and emphasis of a block.
function spans(text, depth = 0) {
  const found = [];
  let end = 0;
  for (const match of depth < DEPTH ? text.matchAll(SPAN) : []) {
    found.push(text.slice(end, match.index), span(match[0], match.groups, depth + 1));
    end = match.index + match[0].length;
  }
  found.push(text.slice(end));
  return found.filter((part) => part !== "");
}

function span(whole, { escaped, code, stars, starred, lines, lined, struck, label, target, url }, depth) {
  if (escaped) return escaped;
  if (code) return { tag: "code", children: [code.trim() || code] };
  const href = (target ?? url) && safe(target ?? url);
  if (target ?? url) return href ? { tag: "a", href, children: label ? unlinked(spans(label, depth)) : [url] } : whole;
  const children = spans(struck ?? starred ?? lined, depth);
  const { length } = stars ?? lines ?? "";
  if (length < 2) return { tag: length ? "em" : "del", children };
  return { tag: "strong", children: length > 2 ? [{ tag: "em", children }] : children };
}

// Replaces links by what is in them: a link cannot contain another one.
function unlinked(parts) {
  return parts.flatMap((part) => {
    if (typeof part === "string") return [part];
    return part.tag === "a" ? part.children : [{ ...part, children: unlinked(part.children) }];
  });
}

function safe(href) {
  try {
    const url = new URL(href);
    return SCHEMES.includes(url.protocol) && url.href;
  } catch {
    return false; // not a complete address
  }
}
