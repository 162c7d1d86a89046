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

/** The names of the models that samples are of. */
export function modelsOf(samples) {
  return [...new Set((samples.get("vllm:num_requests_running") ?? []).map(({ labels }) => labels.model_name ?? ""))];
}

/** The figures of one scrape of a model ("": of all); undefined where the server has no such metric. */
export function read(scraped, model = "") {
  const own = ({ labels }) => !model || (labels.model_name ?? model) === model;
  const samples = new Map([...scraped].map(([name, all]) => [name, all.filter(own)]));
  const series = (names) => names.map((name) => samples.get(name)).find((found) => found?.length);
  const sum = (...names) => series(names)?.reduce((total, { value }) => total + value, 0);
  const mean = (...names) => sum(...names) / series(names)?.length; // a router has a sample for each core
  const phases = {};
  for (const { labels, value } of samples.get("pagewire:frontend_requests") ?? []) phases[labels.phase] = (phases[labels.phase] ?? 0) + value;
  return {
    phases,
    running: sum("vllm:num_requests_running"),
    waiting: sum("vllm:num_requests_waiting"),
    kv: mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prompt: sum("vllm:prompt_tokens_total"),
    generated: sum("vllm:generation_tokens_total"),
    queries: sum("vllm:prefix_cache_queries_total"),
    hits: sum("vllm:prefix_cache_hits_total"),
    finished: sum("vllm:request_success_total"),
    preempted: sum("vllm:num_preemptions_total"),
    stepTokens: sum("vllm:iteration_tokens_total_sum"),
    steps: sum("vllm:iteration_tokens_total_count"),
    drafted: sum("vllm:spec_decode_num_draft_tokens_total"),
    accepted: sum("vllm:spec_decode_num_accepted_tokens_total"),
    busy: sum("pagewire:worker_busy_seconds_total"),
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
