// Formulas: the part of TeX that answers use, as MathML. A formula with anything else is shown as its source.

const SPACE = "http://www.w3.org/1998/Math/MathML";

const GREEK =
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ varnothing ∅ aleph ℵ Re ℜ Im ℑ";
const SIGNS =
  "times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ iff ⟺ Leftarrow ⇐ Leftrightarrow ⇔ mapsto ↦ uparrow ↑ downarrow ↓ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ mid ∣ parallel ∥ perp ⊥ angle ∠ prime ′ lVert ‖ rVert ‖ lvert | rvert | vert | Vert ‖ colon : lbrace { rbrace } { { } } % % $ $ # # & & _ _ | ‖ backslash \\";
const LARGE = "sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂";
const ACCENTS = "hat ^ widehat ^ bar ¯ overline ¯ tilde ~ widetilde ~ vec → dot ˙ ddot ¨";
const [LONGEST, DEEPEST] = [10_000, 40]; // characters, and parts within each other; browsers lay out no more than that quickly
const NAMES = new Set("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp lim max min sup inf arg det dim gcd deg ker Pr argmax argmin softmax".split(" "));
const STYLES = { mathbb: "double-struck", mathcal: "script", mathscr: "script", mathbf: "bold", boldsymbol: "bold", bm: "bold", mathfrak: "fraktur", mathit: "italic", mathrm: "normal", mathsf: "sans-serif", mathtt: "monospace" };
const WIDTHS = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", "!": "0", quad: "1em", qquad: "2em" };
const FENCES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], array: ["", ""], gathered: ["", ""], split: ["", ""] };
// First letters of Unicode's alphabets, by style: capital A, small a, digit 0. Letters with places of their own follow.
const ALPHABETS = { "double-struck": [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6, 0], bold: [0x1d400, 0x1d41a, 0x1d7ce], fraktur: [0x1d504, 0x1d51e, 0], "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2], monospace: [0x1d670, 0x1d68a, 0x1d7f6] };
const OWN_PLACES = { "double-struck": "CℂHℍNℕPℙQℚRℝZℤ", script: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ", fraktur: "CℭHℌIℑRℜZℨ" };

const pairs = (text) => {
  const parts = text.split(" ");
  return new Map(parts.flatMap((name, i) => (i % 2 ? [] : [[name, parts[i + 1]]])));
};
const [letters, signs, large, accents] = [GREEK, SIGNS, LARGE, ACCENTS].map(pairs);

function element(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A formula as a MathML node; display: as a block. What is not known makes all of it appear as source. */
export function formula(source, display = false) {
  try {
    if (source.length > LONGEST) throw new RangeError("too long");
    const parser = new Parser(source, display);
    const row = parser.row(() => false);
    return element("math", display ? { display: "block" } : {}, row);
  } catch {
    const code = document.createElement("code");
    code.textContent = source;
    return code;
  }
}

class Parser {
  #tokens;
  #at = 0;
  #depth = 0;
  #display;

  constructor(source, display) {
    this.#tokens = source.match(/\\(?:text\w*|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+\*?|\\[^A-Za-z]|\d+(?:\.\d+)?|\s+|[^]/gu)?.filter((token) => token.trim()) ?? [];
    this.#display = display;
  }

  get #next() {
    return this.#tokens[this.#at];
  }

  #take(wanted) {
    const token = this.#tokens[this.#at];
    if (token === undefined || (wanted && token !== wanted)) throw new SyntaxError(`no ${wanted}`);
    this.#at += 1;
    return token;
  }

  /** Everything up to a token for which `ends` is true, or to the end. */
  row(ends) {
    const nodes = [];
    while (this.#next !== undefined && !ends(this.#next)) nodes.push(this.#scripted());
    return nodes.length === 1 ? nodes[0] : element("mrow", {}, ...nodes);
  }

  #group() {
    if ((this.#depth += 1) > DEEPEST) throw new RangeError("too deep");
    const group = this.#next === "{" ? this.#braced() : this.#atom();
    this.#depth -= 1;
    return group;
  }

  #braced() {
    this.#take("{");
    const row = this.row((token) => token === "}");
    this.#take("}");
    return row;
  }

  /** The text of a group without spaces, such as a name. */
  #text() {
    this.#take("{");
    let text = "";
    for (let depth = 1; ; ) {
      const token = this.#take();
      depth += (token === "{") - (token === "}");
      if (depth === 0) return text;
      text += token;
    }
  }

  #scripted() {
    const base = this.#group();
    let [below, above] = [null, null];
    for (;;) {
      if (this.#next === "_" && !below) below = (this.#take(), this.#group());
      else if (this.#next === "^" && !above) above = (this.#take(), this.#group());
      else if (this.#next === "'" && !above) above = (this.#take(), element("mo", {}, "′"));
      else break;
    }
    if (!below && !above) return base;
    const limits = this.#display && base.limits;
    const tag = (limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"])[below && above ? 2 : below ? 0 : 1];
    return element(tag, {}, base, ...[below, above].filter(Boolean));
  }

  #atom() {
    const token = this.#take();
    if (/^\d/.test(token)) return element("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return element("mi", {}, token);
    if (token === "}" || token === "_" || token === "^" || token === "&") throw new SyntaxError(token);
    const [, text] = /^\\[a-z]+\s*\{([^{}]*)\}$/.exec(token) ?? [];
    if (text !== undefined) return element("mtext", {}, text.replaceAll(" ", "\u00a0"));
    if (!token.startsWith("\\")) return element("mo", {}, token === "-" ? "−" : token);
    return this.#command(token.slice(1));
  }

  #command(name) {
    if (letters.has(name)) return element("mi", {}, letters.get(name));
    if (signs.has(name)) return element("mo", {}, signs.get(name));
    if (large.has(name)) return Object.assign(element("mo", { largeop: "true" }, large.get(name)), { limits: !name.includes("int") });
    if (NAMES.has(name)) return Object.assign(element("mi", {}, name), { limits: /^(lim|max|min|sup|inf|arg)/.test(name) });
    if (Object.hasOwn(WIDTHS, name)) return element("mspace", { width: WIDTHS[name] });
    if (accents.has(name)) return element("mover", { accent: "true" }, this.#group(), element("mo", {}, accents.get(name)));
    if (Object.hasOwn(STYLES, name)) return styled(this.#group(), STYLES[name]);
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(name)) return element("mfrac", {}, this.#group(), this.#group());
    if (["binom", "dbinom"].includes(name)) return fenced("(", element("mfrac", { linethickness: "0" }, this.#group(), this.#group()), ")");
    if (name === "sqrt") return this.#root();
    if (name === "left") return this.#fenced();
    if (name === "begin") return this.#environment();
    if (["underbrace", "overbrace"].includes(name)) return element(name === "underbrace" ? "munder" : "mover", {}, this.#group(), element("mo", {}, name === "underbrace" ? "⏟" : "⏞"));
    if (["big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg", "biggl", "biggr", "displaystyle", "limits", "nolimits", "boxed"].includes(name)) return name === "boxed" ? this.#group() : element("mspace");
    throw new SyntaxError(name);
  }

  #root() {
    if (this.#next !== "[") return element("msqrt", {}, this.#group());
    this.#take("[");
    const degree = this.row((token) => token === "]");
    this.#take("]");
    return element("mroot", {}, this.#group(), degree);
  }

  #delimiter() {
    const token = this.#take();
    if (token === ".") return "";
    return token.startsWith("\\") ? (signs.get(token.slice(1)) ?? token) : token;
  }

  #fenced() {
    const open = this.#delimiter();
    const row = this.row((token) => token === "\\right");
    this.#take("\\right");
    return fenced(open, row, this.#delimiter());
  }

  #environment() {
    const name = this.#text();
    if (!Object.hasOwn(FENCES, name)) throw new SyntaxError(name);
    if (name === "array") this.#text(); // sides of the columns
    const ends = (token) => token === "&" || token === "\\\\" || token === "\\end";
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(element("mtd", {}, this.row(ends)));
      const end = this.#take();
      if (end === "\\\\") rows.push([]);
      else if (end === "\\end") break;
    }
    this.#text();
    const table = element("mtable", {}, ...rows.map((cells) => element("mtr", {}, ...cells)));
    const [open, close] = FENCES[name];
    return fenced(open, table, close);
  }
}

function fenced(open, row, close) {
  const fence = (text) => (text ? [element("mo", { fence: "true", stretchy: "true" }, text)] : []);
  return element("mrow", {}, ...fence(open), row, ...fence(close));
}

/** The letters and digits of a node in one of Unicode's mathematical alphabets. */
function styled(node, style) {
  for (const leaf of [node, ...node.querySelectorAll("mi, mn")].filter(({ localName }) => localName === "mi" || localName === "mn")) {
    if (style === "normal") leaf.setAttribute("mathvariant", "normal");
    else leaf.textContent = [...leaf.textContent].map((letter) => inAlphabet(letter, style)).join("");
  }
  return node;
}

function inAlphabet(letter, style) {
  const own = [...(OWN_PLACES[style] ?? "")];
  const at = own.indexOf(letter);
  if (at >= 0 && at % 2 === 0) return own[at + 1];
  const [capital, small, digit] = ALPHABETS[style] ?? [];
  for (const [first, place] of [["A", capital], ["a", small], ["0", digit]]) {
    const number = letter.charCodeAt(0) - first.charCodeAt(0);
    if (place && number >= 0 && number < (first === "0" ? 10 : 26)) return String.fromCodePoint(place + number);
  }
  return letter;
}
