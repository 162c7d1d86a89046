// Figures from the text of /metrics: parsing, rates, percentiles. No IO, no DOM.

/** Prometheus text as a map from name to samples [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue; // empty, or a comment
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: number(match[3]) });
  }
  return samples;
}

const number = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity })[text] ?? Number(text);

/** The figures of one scrape; undefined where the server has no such metric. */
export function read(text) {
  const samples = parse(text);
  const series = (names) => names.map((name) => samples.get(`vllm:${name}`)).find(Boolean);
  const sum = (...names) => series(names)?.reduce((total, { value }) => total + value, 0);
  const mean = (...names) => sum(...names) / series(names)?.length; // a router has a sample for each core
  return {
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    kv: mean("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    prompt: sum("prompt_tokens_total"),
    generated: sum("generation_tokens_total"),
    queries: sum("prefix_cache_queries_total", "prefix_cache_queries"),
    hits: sum("prefix_cache_hits_total", "prefix_cache_hits"),
    finished: sum("request_success_total"),
    preempted: sum("num_preemptions_total"),
    ttft: histogram(samples, "vllm:time_to_first_token_seconds"),
    itl: histogram(samples, "vllm:inter_token_latency_seconds"),
  };
}

/** Cumulative counts by upper bound, over all labels: [[bound, count], ...] in order. */
export function histogram(samples, name) {
  const counts = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const bound = number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

/** The counts that a histogram gained between two scrapes. */
export function between(before, after) {
  const old = new Map(before);
  return after.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
}

/** The value below which a share q of a histogram lies, linear within a bucket; NaN if it is empty. */
export function quantile(buckets, q) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return NaN;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= q * total && count > below) {
      return bound === Infinity ? low : low + ((bound - low) * (q * total - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}

/** The scrapes of the last `seconds`, and series computed from them. */
export class History {
  constructor(seconds = 180) {
    this.seconds = seconds;
    this.scrapes = [];
  }

  /** Add one, taken at `time` (seconds). Counters that have gone back (the core was restarted) begin a new history. */
  push(figures, time) {
    if (figures.generated < this.last?.generated || figures.finished < this.last?.finished) this.scrapes = [];
    this.scrapes.push({ ...figures, time });
    while (this.scrapes[0].time < time - this.seconds - 5) this.scrapes.shift();
  }

  get last() {
    return this.scrapes.at(-1);
  }

  /** [time, value] of a gauge at every scrape. */
  gauge(name) {
    return this.scrapes.map((scrape) => [scrape.time, scrape[name]]);
  }

  /** [time, value] of a counter's growth per second, over about `span` seconds each. */
  rate(name, span = 2) {
    return this.#since(span, (now, then) => (now[name] - then[name]) / (now.time - then.time));
  }

  /** [time, value] of one counter's growth over another's. */
  share(part, whole, span = 30) {
    return this.#since(span, (now, then) => (now[part] - then[part]) / (now[whole] - then[whole]));
  }

  /** [time, seconds] of a histogram's q-th quantile over the `span` seconds before each scrape. */
  quantile(name, q, span = 30) {
    return this.#since(span, (now, then) => quantile(between(then[name], now[name]), q));
  }

  #since(span, value) {
    let first = 0;
    return this.scrapes.slice(1).map((now, i) => {
      while (first < i && this.scrapes[first + 1].time <= now.time - span) first += 1;
      return [now.time, value(now, this.scrapes[first])];
    });
  }
}
