// The experts at work: a map of layers by experts, where they lie, and the tokens of an answer by their experts.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { addStyles } from "../canvas.js";
import { choice, make } from "../elements.js";
import { quantile, relativeToEven } from "./counts.js";
import { CountsTable } from "./counts_table.js";
import { ExpertDetail } from "./expert_detail.js";
import { count } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { LayersSummary } from "./layers_summary.js";
import { ScaleLegend } from "./legend.js";
import { describer, tiersLook, tokensLook } from "./looks.js";
import { scaleTop } from "./palette.js";
import { ConversationCounts, RANGES } from "./ranges.js";
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
    this.range = RANGES[0][0];
    this.look = "tokens";
    this.chosen = null; // [row, expert]
    this.samples = new Samples();
    this.conversation = new ConversationCounts(ask, chat);
    this.map = new HeatMap({ label: tr("Experts of each layer. Arrow keys move, Enter chooses."), onChoose: (...cell) => this.choose(cell), announce });
    this.tokens = new TokensView({ ask, chat, announce, onExpert: (...cell) => this.choose(cell), onRoute: (route) => this.map.mark({ route }) });
    this.detail = new ExpertDetail(() => this.choose(null));
    this.scale = new ScaleLegend();
    this.tiers = new TierLegend();
    this.residency = new Residency();
    this.summary = new LayersSummary();
    this.table = new CountsTable(copy);
    this.head = make("p", { className: "experts-head" });
    this.note = make("p", { className: "hint" });
    this.body = make("div", { className: "experts-body", hidden: true }, this.controls(), this.note, this.map.element, this.scale.element, this.tiers.element, this.detail.element, this.table.element, this.tokens.element, this.summary.element, this.residency.element);
    element.append(this.head, this.body);
  }

  controls() {
    const ranges = choice("experts-range", tr("Tokens of"), RANGES.map(([value, text]) => [value, tr(text)]), (range) => {
      this.range = range;
      this.show();
    });
    const looks = choice("experts-look", tr("Colour by"), [["tokens", tr("Tokens")], ["tiers", tr("Place")]], (look) => {
      this.look = look;
      this.show();
    });
    return make("div", { className: "experts-controls" }, ranges, looks);
  }

  async update(signal) {
    const seen = await this.ask("stats/experts", { signal });
    this.seen = seen;
    this.body.hidden = !seen.num_experts;
    setText(this.head, headOf(seen));
    if (!seen.num_experts) return;
    if (seen.total.counts.length) this.samples.add(performance.now() / 1000, seen.total);
    if (this.range === "conversation") this.inConversation = await this.conversation.read(seen.top_k, signal);
    this.show();
    await this.tokens.update(signal);
  }

  /** Show the tokens of a request by its id. */
  open(requestId) {
    this.tokens.open(requestId);
    this.tokens.element.scrollIntoView();
  }

  /** The counts that are shown: { tokens, counts, note }. */
  get counted() {
    if (this.range !== "conversation") return this.seen[this.range];
    return this.inConversation ?? { tokens: 0, counts: [], note: "" };
  }

  show() {
    const { seen, counted: range } = this;
    const { layers, num_experts: numExperts } = seen;
    const relative = range.counts.map(relativeToEven);
    const top = scaleTop(quantile(relative.flat(), SCALE_SHARE));
    const about = { seen, range, relative, top };
    const describe = describer(about);
    const isByTokens = this.look === "tokens";
    this.map.show(layers, numExperts, isByTokens ? tokensLook(this.map.canvas, { ...about, describe }) : tiersLook({ ...about, describe }));
    this.scale.element.hidden = !isByTokens;
    this.scale.show(top);
    this.tiers.element.hidden = isByTokens;
    this.tiers.show(seen);
    setText(this.note, range.note || countLine(range, seen));
    this.table.show(layers, range.counts);
    this.summary.element.hidden = !range.tokens;
    if (range.tokens) this.summary.show(layers, range.counts, seen.top_k);
    this.residency.show(seen, this.server.stats);
    if (this.chosen) this.showDetail(about);
  }

  choose(cell) {
    this.chosen = cell;
    this.map.mark({ chosen: cell });
    this.tokens.highlight(...(cell ?? []));
    if (!cell) this.detail.hide();
    this.show();
  }

  showDetail(about) {
    const [row, expert] = this.chosen;
    const points = this.samples.shares(row * this.seen.num_experts + expert, performance.now() / 1000);
    this.detail.show({ ...about, row, expert, points, texts: this.tokens.textsOf(row, expert) });
  }

  hide() {
    this.tokens.pause();
    this.map.leave();
  }
}

function headOf({ model, layers, num_experts: numExperts, top_k: topK, is_counting: isCounting, not_counted: reason }) {
  if (!numExperts) return tr("{model} has no experts: every token goes through all of it.", { model });
  const facts = tr("{layers} layers with {experts} experts each. In every layer, a router chooses {chosen} of them for each token.", { layers: layers.length, experts: numExperts, chosen: topK });
  if (reason) return `${facts} ${tr("Tokens are not counted: {reason}", { reason })}`;
  return isCounting ? facts : `${facts} ${tr("Counting begins with the next pass.")}`;
}

function countLine({ tokens }, { top_k: topK, layers, counted_s: countedS }) {
  if (!tokens) return tr("No tokens were routed in this time. Ask something, and watch.");
  const choices = tokens * topK * layers.length;
  return tr("{tokens} tokens, so {choices} choices of an expert: {topK} in each of {layers} layers. Counted for {seconds} s.", { tokens: count(tokens), choices: count(choices), topK, layers: layers.length, seconds: count(Math.round(countedS)) });
}
