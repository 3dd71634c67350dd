// The experts at work: a map of layers by experts, where they lie, and the tokens of an answer by their experts.

import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { addStyles } from "../../add_styles.js";
import { choice, make } from "../elements.js";
import { ago } from "../speed/units.js";
import { quantile, relativeToEven, sumAll } from "./counts.js";
import { CountsTable } from "./counts_table.js";
import { ExpertDetail } from "./expert_detail.js";
import { HeatMap } from "./heat_map.js";
import { LayersSummary } from "./layers_summary.js";
import { ScaleLegend } from "./legend.js";
import { describer, tiersLook, tokensLook } from "./looks.js";
import { scaleTop } from "./palette.js";
import { ConversationCounts, RANGES } from "./ranges.js";
import { ReplicaChoice } from "./replica_choice.js";
import { Residency } from "./residency.js";
import { Samples } from "./samples.js";
import { TierLegend } from "./tiers.js";
import { TokensView } from "./tokens_view.js";

const SCALE_SHARE = 0.995; // of cells that are within the scale

addStyles("./experts.css", import.meta.url);

export default class ExpertsView {
  static periodMs = 1000;

  constructor(element, { ask, server, chat, announce, copy }) {
    Object.assign(this, { ask, server });
    this.range = null; // the chosen one of RANGES; null: the best that there is
    this.look = "tokens";
    this.chosen = null; // [row, expert]
    this.answer = null; // of /stats/experts
    this.isToScroll = false; // to the tokens, once they are there
    this.samples = new Samples();
    this.conversation = new ConversationCounts(ask, chat);
    const onChoose = (...cell) => this.choose(cell);
    const onMap = (...cell) => {
      this.choose(cell);
      this.detail.element.scrollIntoView({ block: "nearest" }); // on phones it lies below
    };
    this.map = new HeatMap({ label: tr("Experts of each layer. Arrow keys move, Enter chooses."), onChoose: onMap, announce });
    const toMap = { onExpert: onChoose, onRoute: (route) => this.map.mark({ route }), onLayer: (row) => this.map.mark({ row }) };
    this.tokens = new TokensView({ ask, chat, announce, ...toMap });
    this.detail = new ExpertDetail(() => this.choose(null));
    this.scale = new ScaleLegend();
    this.tiers = new TierLegend();
    this.residency = new Residency();
    this.summary = new LayersSummary();
    this.table = new CountsTable(copy);
    this.head = make("p", { className: "experts-head" });
    this.note = make("p", { className: "hint" });
    const axisNames = [`${tr("Layer")} ↓`, `${tr("Expert")} →`].map((textContent) => make("span", { textContent }));
    const axes = { element: make("div", { className: "heat-axes", "aria-hidden": "true" }, ...axisNames) }; // the map's name tells them
    const parts = [this.scale, this.tiers, axes, this.map, this.detail, this.table, this.tokens, this.summary, this.residency];
    this.body = make("div", { className: "experts-body", hidden: true }, this.controls(), this.note);
    this.body.append(...parts.map((part) => part.element));
    element.append(this.head, this.body);
  }

  controls() {
    const ranges = RANGES.map(([value, text]) => [value, tr(text)]);
    const looks = [["tokens", tr("Tokens")], ["tiers", tr("Place")]];
    this.ranges = choice("experts-range", tr("Tokens of"), ranges, (range) => this.use({ range }));
    const look = choice("experts-look", tr("Colour by"), looks, (it) => this.use({ look: it }));
    this.replica = new ReplicaChoice(() => this.show());
    return make("div", { className: "experts-controls" }, this.ranges, look, this.replica.element);
  }

  use(change) {
    Object.assign(this, change);
    this.show();
  }

  async update(signal) {
    const seen = withNames(await this.ask("stats/experts", { signal }));
    if (seen.model !== this.answer?.model) this.begin();
    this.answer = seen;
    this.body.hidden = !seen.layers.length;
    setText(this.head, headOf(seen));
    if (this.body.hidden) return;
    this.samples.add(performance.now() / 1000, seen.total); // of all replicas
    this.inConversation = await this.conversation.read(seen, signal);
    this.show();
    await this.tokens.update(seen.layers, signal);
    if (this.shownRange === "answer") this.show(); // its tokens may be new
    if (this.isToScroll) this.tokens.element.scrollIntoView();
    this.isToScroll = false;
  }

  /** Begin anew, with another model. */
  begin() {
    this.samples = new Samples();
    this.chosen = null;
    this.map.mark({ chosen: null });
    this.detail.hide();
  }

  /** Show the tokens of a request, such as one of the API, by its id. The next update brings them. */
  open({ request }) {
    this.tokens.open(request);
    this.range = "answer"; // the map shows the same tokens
    this.isToScroll = true;
  }

  /** The name of the range that is shown. */
  get shownRange() {
    return this.range ?? (this.inConversation.tokens ? "conversation" : "total");
  }

  countsIn(range, seen) {
    if (range === "conversation") return this.inConversation;
    return range === "answer" ? this.tokens.countsOf(seen.layers) : seen[range];
  }

  show() {
    const { shownRange } = this;
    const seen = this.replica.pick(this.answer);
    for (const input of this.ranges.querySelectorAll("input")) input.checked = input.value === shownRange;
    const range = this.countsIn(shownRange, seen);
    const { layers, num_experts: numExperts } = seen;
    const relative = range.counts.map(relativeToEven);
    const top = scaleTop(quantile(relative.flat(), SCALE_SHARE));
    const about = { seen, range, relative, top };
    const isByTokens = this.look === "tokens";
    const painter = () => (isByTokens ? tokensLook(this.map.canvas, about) : tiersLook(seen));
    this.map.show(layers, numExperts, { describe: describer(about), painter });
    this.scale.element.hidden = !isByTokens;
    this.scale.show(top);
    this.tiers.element.hidden = isByTokens;
    this.tiers.show(seen);
    setText(this.note, noteOf(range, seen, shownRange === "total"));
    this.table.show(layers, range.counts);
    this.summary.element.hidden = !range.tokens;
    if (range.tokens) this.summary.show(layers, range.counts, seen.top_k);
    this.residency.show(seen, this.server.stats);
    if (this.chosen) this.showDetail(about);
  }

  choose(cell) {
    if (cell && !this.map.has(cell)) return; // of an answer of another model
    this.chosen = cell;
    this.map.mark({ chosen: cell });
    this.tokens.highlight(...(cell ?? []));
    if (!cell) this.detail.hide();
    this.show();
  }

  showDetail(about) {
    const [row, expert] = this.chosen;
    const points = this.samples.shares(row * about.seen.num_experts + expert, performance.now() / 1000);
    this.detail.show({ ...about, row, expert, points, texts: this.tokens.textsOf(row, expert) });
  }

  hide() {
    this.tokens.pause();
    this.map.leave();
  }
}

/** With names in place of the numbers of layers: "E3" is layer 3 of an encoder, "3" of a decoder. */
function withNames(seen) {
  const nameOf = (layer, row) => (row < seen.num_encoder_layers ? `E${layer}` : String(layer));
  const layers = seen.layers.map(nameOf);
  return { ...seen, layers, replicas: seen.replicas.map((replica) => ({ ...replica, layers })) };
}

function headOf({ model, layers, num_encoder_layers: numEncoder, num_experts: numExperts, top_k: topK, not_counted: reason }) {
  if (!numExperts) return tr("{model} has no experts: every token goes through all of it.", { model });
  const missing = reason ? tr("Not counted: {reason}.", { reason }) : "";
  if (!layers.length) return missing;
  const values = { layers: layers.length, experts: numExperts, chosen: topK };
  const facts = tr("{layers} layers with {experts} experts each. In every layer, a router chooses {chosen} of them for each token.", values);
  const encoder = numEncoder ? tr("E: layers of the encoder.") : "";
  return [facts, encoder, missing].filter(Boolean).join(" ");
}

/** The counted tokens, in one line. `isTotal`: they are all since counting began. */
function noteOf({ tokens, counts, note = "" }, { top_k: topK, layers, counted_s: countedS }, isTotal) {
  if (!tokens) return note || tr("No tokens were routed in this time. Ask something, and watch.");
  const values = { tokens: formatNumber(tokens), choices: formatNumber(sumAll(counts)), topK, layers: layers.length };
  const line = tr("{tokens} tokens made {choices} choices of an expert: {topK} in each of {layers} layers.", values);
  const began = isTotal ? tr("Counting began {age}.", { age: ago(countedS) }) : "";
  return [line, began, note].filter(Boolean).join(" ");
}
