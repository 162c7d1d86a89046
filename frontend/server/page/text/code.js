// Colours of code: comments, strings, numbers, keywords and called names, by a few rules for families of languages.

import { make } from "../dom.js";

const words = (text) => new Set(text.split(" "));
const C_WORDS =
  "auto bool break case char class const constexpr continue default delete do double else enum explicit extern false float for fn func function go goto if impl import in inline int interface let long loop match mod move mut namespace new nil null nullptr package private protected pub public ref return self short signed sizeof static struct super switch template this throw throws trait true try type typedef typename union unsafe unsigned use using var virtual void volatile where while yield async await export extends from of instanceof catch finally";
const PYTHON_WORDS =
  "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda match case nonlocal not or pass raise return self try while with yield";
const SHELL_WORDS = "if then else elif fi for while do done case esac in function return export local set unset echo cd exit source";
const SQL_WORDS =
  "select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order having limit as distinct union null is in like between primary key references index view case when then else end";

const SLASHES = /\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)/;
const HASH = /#[^\n]*/;
const QUOTED = /"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?/;
const PYTHON_QUOTED = /[rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)/;
const BACKTICKS = new RegExp(`${QUOTED.source}|\`(?:\\\\.|[^\`\\\\])*\`?`);

const FAMILIES = [
  [words("python py python3 pycon ipython"), HASH, PYTHON_QUOTED, words(PYTHON_WORDS)],
  [words("sh bash shell zsh console dockerfile makefile"), HASH, QUOTED, words(SHELL_WORDS)],
  [words("yaml yml toml ini ruby rb perl r julia"), HASH, QUOTED, words(`${PYTHON_WORDS} true false end do begin`)],
  [words("sql postgresql sqlite mysql"), /--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)/, QUOTED, words(`${SQL_WORDS} ${SQL_WORDS.toUpperCase()}`)],
  [words("html xml svg"), /<!--[\s\S]*?(?:-->|$)/, QUOTED, words("")],
  [words("json jsonc"), SLASHES, QUOTED, words("true false null")],
  [words("javascript js jsx typescript ts tsx go"), SLASHES, BACKTICKS, words(C_WORDS)],
  [words("c h cpp c++ cc cuda java kotlin swift rust rs csharp cs php scala dart css scss"), SLASHES, QUOTED, words(C_WORDS)],
];
const MOST = 50_000; // characters; longer code stays plain, so that a stream of it stays quick

/** The nodes of code in a language by its name in a fence; plain text if it is none of those above. */
export function coloured(source, language = "") {
  const family = FAMILIES.find(([names]) => names.has(language.toLowerCase()));
  if (!family || source.length > MOST) return [source];
  const [, comment, string, keywords] = family;
  const pattern = new RegExp(`(?<comment>${comment.source})|(?<string>${string.source})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let end = 0;
  for (const match of source.matchAll(pattern)) {
    const kind = kindOf(match.groups, source.slice(match.index + match[0].length), keywords);
    if (!kind) continue;
    if (match.index > end) nodes.push(source.slice(end, match.index));
    nodes.push(make("span", { className: `c-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  if (end < source.length) nodes.push(source.slice(end));
  return nodes;
}

function kindOf({ comment, string, number, word }, rest, keywords) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  if (keywords.has(word)) return "keyword";
  return /^\s*\(/.test(rest.slice(0, 8)) ? "call" : null;
}
