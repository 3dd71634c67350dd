// The last requests, of this page and of all programs, and the story of each.

import { explain } from "../../chat/explain.js";
import { addStyles } from "../../add_styles.js";
import { tr } from "../../translate.js";
import { RequestList } from "./request_list.js";
import { StoryView } from "./story_view.js";

const NOT_FOUND = 404;

addStyles("./requests.css", import.meta.url);

export default class RequestsView {
  static periodMs = 1000;

  constructor(element, context) {
    this.ask = context.ask;
    this.opened = null; // the id of the request whose story is shown
    this.isUnknown = false; // whether the server has said that it does not know it
    this.list = new RequestList((id) => this.choose(id));
    this.story = new StoryView(() => this.back(), context);
    this.story.element.hidden = true;
    element.append(this.list.element, this.story.element);
  }

  async update(signal) {
    if (this.opened !== null) await this.updateStory(signal);
    else this.list.show((await this.ask("stats/requests", { signal })).requests);
  }

  async updateStory(signal) {
    const id = this.opened;
    const { story } = this.story;
    if (this.isUnknown || (story && story.state !== "running")) return; // nothing changes any more
    try {
      const found = await this.ask(`stats/requests/${encodeURIComponent(id)}`, { signal });
      if (this.opened === id) this.story.show(found);
    } catch (error) {
      if (error.status !== NOT_FOUND || this.opened !== id) throw error;
      this.isUnknown = true;
      this.story.fail(tr("The server does not know this request any more: it keeps the last 200, until it is restarted."));
    }
  }

  /** Show the story of a request. */
  open(id) {
    this.opened = id;
    this.isUnknown = false;
    this.story.begin(id);
    this.list.element.hidden = true;
    this.story.element.hidden = false;
  }

  async choose(id) {
    this.open(id);
    this.story.title.focus();
    try {
      await this.updateStory();
    } catch (error) {
      this.story.fail(explain(error));
    }
  }

  back() {
    const id = this.opened;
    this.hide();
    this.list.focus(id);
  }

  /** Leave the story: the tab begins with the list. */
  hide() {
    this.opened = null;
    this.story.hide();
    this.story.element.hidden = true;
    this.list.element.hidden = false;
  }
}
