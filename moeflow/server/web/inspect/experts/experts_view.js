// The experts at work: a map of layers by experts, where they lie, and the tokens of an answer by their experts.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { addStyles } from "../canvas.js";
import { choice, make } from "../elements.js";
import { quantile, relativeToEven, sumAll } from "./counts.js";
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
    this.range = null; // the chosen one of RANGES; null: the best that there is
    this.look = "tokens";
    this.chosen = null; // [row, expert]
    this.samples = new Samples();
    this.conversation = new ConversationCounts(ask, chat);
    const onChoose = (...cell) => this.choose(cell);
    this.map = new HeatMap({ label: tr("Experts of each layer. Arrow keys move, Enter chooses."), onChoose, announce });
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
    const parts = [this.map, this.scale, this.tiers, this.detail, this.table, this.tokens, this.summary, this.residency];
    this.body = make("div", { className: "experts-body", hidden: true }, this.controls(), this.note);
    this.body.append(...parts.map((part) => part.element));
    element.append(this.head, this.body);
  }

  controls() {
    const ranges = RANGES.map(([value, text]) => [value, tr(text)]);
    const looks = [["tokens", tr("Tokens")], ["tiers", tr("Place")]];
    this.ranges = choice("experts-range", tr("Tokens of"), ranges, (range) => this.use({ range }));
    const look = choice("experts-look", tr("Colour by"), looks, (it) => this.use({ look: it }));
    return make("div", { className: "experts-controls" }, this.ranges, look);
  }

  use(change) {
    Object.assign(this, change);
    this.show();
  }

  async update(signal) {
    const seen = await this.ask("stats/experts", { signal });
    this.seen = seen;
    this.body.hidden = !seen.num_experts;
    setText(this.head, headOf(seen));
    if (!seen.num_experts) return;
    this.samples.add(performance.now() / 1000, seen.total);
    this.inConversation = await this.conversation.read(seen.top_k, signal);
    this.show();
    await this.tokens.update(signal);
  }

  /** Show the tokens of a request by its id. */
  open(requestId) {
    this.tokens.open(requestId);
    this.tokens.element.scrollIntoView();
  }

  /** The name of the range that is shown. */
  get shownRange() {
    return this.range ?? (this.inConversation.tokens ? "conversation" : "total");
  }

  show() {
    const { seen, shownRange } = this;
    for (const input of this.ranges.querySelectorAll("input")) input.checked = input.value === shownRange;
    const range = shownRange === "conversation" ? this.inConversation : seen[shownRange];
    const { layers, num_experts: numExperts } = seen;
    const relative = range.counts.map(relativeToEven);
    const top = scaleTop(quantile(relative.flat(), SCALE_SHARE));
    const about = { seen, range, relative, top };
    const describe = describer(about);
    const isByTokens = this.look === "tokens";
    const look = isByTokens ? tokensLook(this.map.canvas, { ...about, describe }) : tiersLook({ seen, describe });
    this.map.show(layers, numExperts, look);
    this.scale.element.hidden = !isByTokens;
    this.scale.show(top);
    this.tiers.element.hidden = isByTokens;
    this.tiers.show(seen);
    setText(this.note, noteOf(range, seen));
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
  const values = { layers: layers.length, experts: numExperts, chosen: topK };
  const facts = tr("{layers} layers with {experts} experts each. In every layer, a router chooses {chosen} of them for each token.", values);
  if (reason) return `${facts} ${tr("Tokens are not counted: {reason}", { reason })}`;
  return isCounting ? facts : `${facts} ${tr("Counting begins with the next pass.")}`;
}

/** The counted tokens, in one line. */
function noteOf({ tokens, counts, note = "" }, { top_k: topK, layers, counted_s: countedS }) {
  if (!tokens) return note || tr("No tokens were routed in this time. Ask something, and watch.");
  const values = { tokens: count(tokens), choices: count(sumAll(counts)), topK, layers: layers.length };
  const line = [
    tr("{tokens} tokens made {choices} choices of an expert: {topK} in each of {layers} layers.", values),
    tr("Counting began {seconds} s ago.", { seconds: count(Math.round(countedS)) }),
  ].join(" ");
  return note ? `${line} ${note}` : line;
}
