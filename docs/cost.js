// The cost of a layer as `native_sparse_attention.nsa_cost` counts it, and a form that shows it.
// tests/test_cost.py holds `nsaCost` to `nsa_cost`. Names are those of NSAConfig.
"use strict";

const COST_DEFAULTS = {
  dim: 4096, dim_head: 128, heads: 32, kv_heads: 8, causal: true, norm: true,
  compress_block_size: 32, compress_block_sliding_stride: 16, selection_block_size: 64,
  num_selected_blocks: 13, sliding_window_size: 511, num_initial_blocks: 1, num_local_blocks: 2,
  selection_stride: 1, num_selected_groups: 0, importance: "logits", query_heads_share_selected_kv: true,
  branches: ["compressed", "selected", "window"], dense_length: 0, branch_kv: "shared",
  num_compressed_mem_kv: 1, attention_sinks: false, compress_mlp_expand_factor: 1,
  rank_rotated: false, index_dim: null, index_heads: 1,
  qkv_bias: false, out_bias: false, qk_norm: false, use_diff_topk: false,
  mean: false, // whether compress_mlp is MeanPool()
};

function costErrors(c) {
  const [l, d, s, R] = [c.compress_block_size, c.compress_block_sliding_stride,
    c.selection_block_size, c.selection_stride];
  const errors = [];
  if (c.heads % c.kv_heads) errors.push("heads must be a multiple of kv_heads");
  if (l < d) errors.push("l must be at least d, so that each token lies in a window");
  if (s % d && d % s) errors.push("one of s and d must divide the other");
  if (s % R) errors.push("selection_stride must divide s");
  if (c.dense_length % (c.num_selected_groups ? 4 * s : R))
    errors.push("selection_stride, in two stages 4 s, must divide dense_length");
  if (c.dense_length && c.branches.length > 1) errors.push("dense_length goes with one softmax only");
  if (c.rank_rotated && c.branches.includes("compressed"))
    errors.push("rotated keys rank without the compressed branch only");
  if (c.num_selected_groups && !(c.causal && c.rank_rotated && c.importance !== "probs" && R === 1
      && c.num_local_blocks > 0 && c.num_local_blocks % 4 === 0))
    errors.push("two stages need rotated keys, no probs, and 4, 8, .. local blocks");
  return errors;
}

// keys that query i sees in each branch, memory slots included
function keysRead(i, T, c) {
  const [d, s, w] = [c.compress_block_sliding_stride, c.selection_block_size,
    c.sliding_window_size];
  const read = {compressed: 0, selected: 0, window: 0};
  if (c.branches.includes("compressed")) {
    read.compressed = windowsSeen(i, T, c) + c.num_compressed_mem_kv;
  }
  if (c.branches.includes("selected")) {
    const [n, initial, local] = [c.num_selected_blocks, c.num_initial_blocks, c.num_local_blocks];
    if (c.causal) {
      const own = Math.floor(i / s);
      const firstLocal = Math.max(0, own - local + 1);
      const ofLocal = local ? i + 1 - firstLocal * s : 0;
      const ofInitial = Math.min(initial * s, local ? firstLocal * s : i + 1);
      const leader = i - i % c.selection_stride;
      const complete = Math.floor(leader / Math.max(d, s)) * Math.max(1, Math.floor(d / s));
      const ranked = Math.max(0, Math.min(complete, local ? firstLocal : own) - initial);
      read.selected = ofLocal + ofInitial + Math.min(ranked, n) * s;
    } else {
      read.selected = Math.min(T, (initial + n) * s);
    }
  }
  if (c.branches.includes("window")) {
    read.window = Math.min(i, w) + 1 + (c.causal ? 0 : Math.min(T - 1 - i, w));
  }
  return read;
}

function windowsSeen(i, T, c) {
  const d = c.compress_block_sliding_stride;
  return c.causal ? Math.floor(i / d) : Math.ceil(T / d);
}

function totalRead(i, T, c) {
  if (c.dense_length && c.causal && i < c.dense_length) return i + 1;
  if (c.dense_length && !c.causal && c.dense_length >= T) return T;
  const read = keysRead(i, T, c);
  return read.compressed + read.selected + read.window;
}

// keys of tokens by which a second stage ranks for query i
function tokensRanked(i, c) {
  const size = 4 * c.selection_block_size;
  const groups = Math.floor(i / size) - Math.floor(c.num_local_blocks / 4) + 1;
  return Math.min(Math.max(groups, 0), c.num_selected_groups) * size;
}

// the first of T queries that ranks blocks, T if none does: dense queries rank only for others that
// share their rankings
function firstRanking(T, c) {
  if (c.branches.join() !== "selected") return 0;
  if (c.selection_stride > 1) return T <= c.dense_length ? T : 0; // dense tokens rank for others
  const [s, local] = [c.selection_block_size, c.num_local_blocks];
  const covers = c.compress_block_sliding_stride <= s && (local > 0 || !c.causal) && !c.use_diff_topk;
  const blocks = c.num_initial_blocks + c.num_selected_blocks + (c.causal ? local : 0);
  const unit = c.num_selected_groups ? 4 * s : 1;
  const covered = covers ? Math.floor(s * blocks / unit) * unit : 0;
  if (T <= Math.max(c.dense_length, covered)) return T;
  return c.causal ? c.dense_length : 0;
}

// costs of `batch` sequences of T tokens; `size`: bytes of a number
function nsaCost(settings, T, batch = 1, size = 2) {
  const c = {...COST_DEFAULTS, ...settings};
  const [H, K, D, l, d] = [c.heads, c.kv_heads, c.dim_head, c.compress_block_size,
    c.compress_block_sliding_stride];
  const has = (branch) => c.branches.includes(branch);
  const sets = c.branch_kv === "independent" ? c.branches.length : 1;
  const ranks = has("selected") && c.num_selected_blocks > 0;
  const compresses = has("compressed") || ranks;
  const indexed = c.importance === "index" && ranks;
  const indexDim = c.index_dim ?? D;
  const windows = c.causal ? Math.floor(T / d) : Math.ceil(T / d);

  // compression networks: without the compressed branch, compressed keys are means
  const mean = c.mean || !has("compressed");
  const hidden = Math.trunc(c.compress_mlp_expand_factor * l * D);
  const byTokens = c.rank_rotated && l === 1 && d === 1 && compresses && !indexed && mean;
  const networks = byTokens ? 0 : (compresses ? 1 : 0) + (has("compressed") ? 1 : 0);
  const networkFlops = mean ? 0
    : networks * 2 * batch * K * windows * (l * D * hidden + hidden * D);

  // learned numbers
  const gates = c.branches.length > 1 ? c.branches.length * H : 0;
  const index = indexed ? c.dim * (K + c.index_heads) * indexDim : 0;
  const weights = c.dim * ((2 * H + 2 * K * sets) * D + gates) + index;
  const besides = (kvSets) => (c.norm ? c.dim : 0) + (c.qkv_bias ? (H + 2 * K * kvSets) * D : 0)
    + (c.out_bias ? c.dim : 0) + (c.qk_norm ? 2 * D : 0);
  let parameters = weights + gates + besides(sets);
  if (c.attention_sinks) parameters += c.branches.length * H;
  if (has("compressed")) {
    parameters += 2 * K * D * (c.num_compressed_mem_kv + l);
    if (!mean) parameters += 2 * (l * D * hidden + hidden + hidden * D + D);
  }

  // attention and ranking
  let [pairs, scored] = [0, 0];
  for (let i = 0; i < T; i++) pairs += totalRead(i, T, c);
  const leaderStride = c.num_selected_groups ? 4 * c.selection_block_size : c.selection_stride;
  for (let i = firstRanking(T, c); i < T; i += leaderStride) scored += windowsSeen(i, T, c);
  for (let i = firstRanking(T, c); i < T; i += c.selection_stride) scored += tokensRanked(i, c);
  const perHead = ["probs", "head_max"].includes(c.importance) || !c.query_heads_share_selected_kv;
  const width = indexed ? indexDim : D;
  let attention = 4 * D * H * batch * pairs;
  if (ranks) attention += 2 * width * (perHead ? H : K) * batch * scored;

  // cache, and what a decoding step reads
  const entry = 2 * K * D * size;
  const rankingEntry = (indexed ? c.index_heads * indexDim : K * D) * size;
  let [cache, step] = [0, 0];
  if (c.causal) {
    const ownWindow = sets > 1 && c.branches[c.branches.length - 1] === "window";
    const ofWindows = networks === 2 ? entry : rankingEntry * networks;
    cache = batch * ((ownWindow ? 2 : 1) * T * entry + Math.floor(T / d) * ofWindows);
    const read = totalRead(T, T + 1, c) - (has("compressed") ? c.num_compressed_mem_kv : 0);
    step = parameters * size + batch * read * entry;
    const every = c.num_selected_groups ? leaderStride : 1;
    const rankedBy = Math.floor(Math.floor(T / d) / every) + tokensRanked(T, c);
    if (ranks && !has("compressed") && firstRanking(T + 1, c) <= T)
      step += batch * rankedBy * rankingEntry;
  }

  // dense attention of the same width, heads and norm
  const denseWeights = c.dim * (2 * H + 2 * K) * D;
  const denseParameters = denseWeights + besides(1);
  const denseAttention = 4 * D * H * batch * (c.causal ? T * (T + 1) / 2 : T * T);
  const denseCache = c.causal ? batch * T * entry : 0;
  return {
    sparse: {
      parameters,
      flops: 2 * batch * T * weights + networkFlops + attention,
      attention_flops: attention,
      cache_bytes: cache,
      step_bytes: step,
    },
    dense: {
      parameters: denseParameters,
      flops: 2 * batch * T * denseWeights + denseAttention,
      attention_flops: denseAttention,
      cache_bytes: denseCache,
      step_bytes: c.causal ? denseParameters * size + denseCache + batch * entry : 0,
    },
  };
}

// the form: everything below needs a page

const COST_FIELDS = [
  ["T", "tokens of a sequence", 65536],
  ["batch", "sequences", 1],
  ["dim", "width of the model"],
  ["dim_head", "D, head dimension"],
  ["heads", "H, query heads"],
  ["kv_heads", "K, KV heads"],
  ["compress_block_size", "l, tokens of a window"],
  ["compress_block_sliding_stride", "d, from window to window"],
  ["selection_block_size", "s, tokens of a block"],
  ["num_selected_blocks", "n, ranked blocks of a query", null, 0],
  ["num_initial_blocks", "first blocks, always read", null, 0],
  ["num_local_blocks", "last blocks, always read", null, 0],
  ["sliding_window_size", "w, keys behind the query", null, 0],
  ["selection_stride", "R, tokens that share a ranking"],
  ["num_selected_groups", "groups of 4 blocks, of two stages", null, 0],
  ["dense_length", "positions below it read all keys", null, 0],
];
const COST_CHOICES = [
  ["branches", "branches", {"all three": COST_DEFAULTS.branches, "selected: one softmax": ["selected"]}],
  ["importance", "score of a block", {
    logits: "logits", max: "max", "max of all heads": "head_max", probs: "probs",
  }],
  ["rank_rotated", "keys that rank blocks", {"before rotation": false, "rotated": true}],
  ["mean", "compression network", {"the layer's own": false, "MeanPool()": true}],
  ["branch_kv", "keys and values", {shared: "shared", independent: "independent"}],
  ["size", "bytes of a number", {"2 (bf16, fp16)": 2, "4 (fp32)": 4}],
];
const COST_MAX_TOKENS = 2 ** 21; // the sum over queries is a loop

function lastQuery(c, T) {
  const read = keysRead(T - 1, T, c);
  const parts = T <= c.dense_length ? "dense"
    : c.branches.map((name) => `${read[name]} ${name}`).join(", ");
  return `The last query reads ${totalRead(T - 1, T, c)} keys (${parts}) of ${T}.`;
}

function shortNumber(x, units) {
  let k = 0;
  while (x >= 1000 && k < units.length - 1) [x, k] = [x / 1000, k + 1];
  return `${Number(x.toPrecision(4))}${units[k]}`;
}

function costPage(root) {
  const make = (tag, text, parent) => {
    const node = document.createElement(tag);
    if (text) node.textContent = text;
    return parent.appendChild(node);
  };
  root.replaceChildren();
  const form = make("form", "", root);
  const problem = make("p", "", root);
  const result = make("div", "", root);
  const values = {};
  for (const [name, about, start, least] of COST_FIELDS) {
    const label = make("label", "", form);
    make("code", name, label);
    make("span", about, label);
    const input = make("input", "", label);
    Object.assign(input, {type: "number", min: least ?? 1, step: 1});
    input.value = start ?? COST_DEFAULTS[name];
    values[name] = () => (input.checkValidity() && input.value !== "" ? Number(input.value) : NaN);
  }
  for (const [name, about, choices] of COST_CHOICES) {
    const label = make("label", "", form);
    make("code", name === "mean" ? "compress_mlp" : name === "size" ? "dtype" : name, label);
    make("span", about, label);
    const select = make("select", "", label);
    for (const key of Object.keys(choices)) make("option", key, select);
    values[name] = () => choices[select.value];
  }

  function show() {
    const given = Object.fromEntries(Object.entries(values).map(([name, get]) => [name, get()]));
    const {T, batch, size, ...settings} = given;
    const bad = Object.keys(given).filter((name) => Number.isNaN(given[name]));
    const errors = bad.length ? [`not a valid number: ${bad.join(", ")}`] : costErrors(settings);
    if (T > COST_MAX_TOKENS) errors.push(`T of at most ${COST_MAX_TOKENS} here; nsa_cost takes more`);
    problem.textContent = errors.join("; ");
    result.replaceChildren();
    if (errors.length) return;
    const {sparse, dense} = nsaCost(settings, T, batch, size);
    const plain = ["", " thousand", " million", " billion"];
    const rows = [
      ["parameters", "parameters", plain],
      ["operations of a forward", "flops", ["", " k", " M", " G", " T", " P", " E"]],
      ["of these, attention and ranking", "attention_flops", ["", " k", " M", " G", " T", " P", " E"]],
      ["bytes of the cache", "cache_bytes", [" B", " kB", " MB", " GB", " TB"]],
      ["bytes that a decoding step reads", "step_bytes", [" B", " kB", " MB", " GB", " TB"]],
    ];
    const table = make("table", "", result);
    const head = make("tr", "", make("thead", "", table));
    for (const title of ["", "this layer", "dense attention", "dense / sparse"]) make("th", title, head);
    const body = make("tbody", "", table);
    for (const [title, name, units] of rows) {
      const row = make("tr", "", body);
      make("td", title, row);
      make("td", shortNumber(sparse[name], units), row);
      make("td", shortNumber(dense[name], units), row);
      make("td", (dense[name] / sparse[name]).toPrecision(3), row);
    }
    make("p", lastQuery({...COST_DEFAULTS, ...settings}, T), result);
  }
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

if (typeof document !== "undefined") {
  const root = document.getElementById("cost-calculator");
  if (root) costPage(root);
}
if (typeof module !== "undefined") {
  module.exports = {nsaCost, costErrors, lastQuery, COST_DEFAULTS, COST_FIELDS, COST_CHOICES};
}
