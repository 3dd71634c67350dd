// Branches of a conversation: a message and all that follows it.

/** The tree in rows, as it is drawn: { message, level, place, count } in the order of reading. `count` is the number of
 *  versions of the message, and `place` its number among them. Only versions are a level deeper than their parent. */
export function branchRows(messages) {
  const children = Map.groupBy(messages, ({ parent }) => parent);
  const rows = [];
  const waiting = [{ id: "", level: 0 }]; // the last one is next
  const push = ({ id, level }) => {
    const versions = children.get(id) ?? [];
    const deeper = versions.length > 1 ? level + 1 : level;
    const found = versions.map((message, i) => ({ message, level: deeper, place: i + 1, count: versions.length }));
    waiting.push(...found.reverse().map((row) => ({ id: row.message.id, level: deeper, row })));
  };
  push(waiting.pop());
  while (waiting.length) {
    const next = waiting.pop();
    rows.push(next.row);
    push(next);
  }
  return rows;
}

/** The ids of a message and of all that follow it. Parents stand before their children. */
export function branchIds(messages, first) {
  const ids = new Set([first.id]);
  for (const { id, parent } of messages) if (ids.has(parent)) ids.add(id);
  return ids;
}

/** Messages without the removed ones, and without those that answered them. */
export function withoutRemoved(messages, removed) {
  const gone = new Set(removed);
  return messages.filter(({ id, parent }) => {
    if (!gone.has(id) && !gone.has(parent)) return true;
    gone.add(id);
    return false;
  });
}

/** Give messages whose ids are among the removed ones new ids, so that they can come back. Changes what `chosen` names. */
export function renew(messages, chosen, removed, newId) {
  const names = new Map(messages.filter(({ id }) => removed.has(id)).map(({ id }) => [id, newId()]));
  const nameOf = (id) => names.get(id) ?? id;
  for (const message of messages) Object.assign(message, { id: nameOf(message.id), parent: nameOf(message.parent) });
  for (const [parent, child] of Object.entries(chosen)) {
    if (!names.has(parent) && !names.has(child)) continue;
    delete chosen[parent];
    chosen[nameOf(parent)] = nameOf(child);
  }
}
