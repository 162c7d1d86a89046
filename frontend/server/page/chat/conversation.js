// A conversation is a tree of messages, so that an edit or another answer loses nothing: `leaf` is the end of the branch in
// view. Pure: no IO, no DOM.
//
// message: {id, parent, role: user | assistant | tool, content, pictures?, reasoning?, calls?, call?, tokens?, model?,
//           note?, error?, status?, full?, running?}: record.js checks those that come from elsewhere.

const unique = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`; // also without https

/** since: the first message that is sent along; null: all are. */
export function create() {
  return { id: unique(), title: "", changed: Date.now(), messages: [], leaf: null, since: null };
}

/** The messages of the branch in view, first to last. */
export function path(conversation) {
  const known = new Map(conversation.messages.map((message) => [message.id, message]));
  const messages = [];
  for (let at = known.get(conversation.leaf); at; at = known.get(at.parent)) messages.push(at);
  return messages.reverse();
}

/** Add a message after `parent` (default: the end of the branch in view), and show it. */
export function add(conversation, fields, parent = conversation.leaf) {
  const message = { id: unique(), parent, ...fields };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.changed = Date.now();
  return message;
}

/** A message and the others in its place, oldest first. */
export const siblings = (conversation, { parent }) => conversation.messages.filter((message) => message.parent === parent);

/** Show the branch of a message, down to its newest end. */
export function choose(conversation, message) {
  for (let next = message; next; next = conversation.messages.findLast(({ parent }) => parent === message.id)) message = next;
  conversation.leaf = message.id;
}

/** Take out a message and all after it. */
export function prune(conversation, message) {
  const gone = new Set([message.id]);
  for (const { id, parent } of conversation.messages) if (gone.has(parent)) gone.add(id);
  conversation.messages = conversation.messages.filter(({ id }) => !gone.has(id));
  if (gone.has(conversation.leaf)) conversation.leaf = message.parent;
}

/** A new conversation with the messages up to and including this one. */
export function branch(conversation, message) {
  const messages = structuredClone(path(conversation));
  const end = messages.findIndex(({ id }) => id === message.id);
  return { ...create(), title: `${title(conversation)} (branch)`, messages: messages.slice(0, end + 1), leaf: message.id };
}

/** True for an answer without anything in it: it failed, or was stopped before its first token. */
export const empty = ({ content, reasoning, calls }) => !content && !reasoning && !calls?.length;

/** The messages to send for an answer at the end of the branch, in the shape of the API.
 * A question without an answer is left out, and so is everything before `since`. */
export function sent(conversation) {
  const messages = path(conversation);
  const kept = [];
  for (const message of messages.slice(Math.max(0, messages.findIndex(({ id }) => id === conversation.since)))) {
    if (message.role !== "assistant" || !empty(message)) kept.push(message);
    else kept.length = Math.max(0, kept.findLastIndex(({ role }) => role === "user"));
  }
  return kept.map(shaped);
}

function shaped({ role, content, pictures, calls, call }) {
  if (role === "tool") return { role, tool_call_id: call, content };
  if (calls?.length) {
    const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role, content: content || null, tool_calls };
  }
  if (!pictures?.length) return { role, content };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...parts, ...(content ? [{ type: "text", text: content }] : [])] };
}

/** Its title: given by the user, or its first words. */
export function title(conversation) {
  const first = conversation.messages.find(({ role }) => role === "user");
  return conversation.title || first?.content.slice(0, 80).replace(/\s+/g, " ").trim() || (first ? "Picture" : "New chat");
}

/** True if the title or some message has all of these words. */
export function matches(conversation, query) {
  const text = [title(conversation), ...conversation.messages.map(({ content }) => content)].join("\n").toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** The branch in view as Markdown. */
export function markdown(conversation) {
  const parts = path(conversation).map(({ role, content, reasoning, calls, model, error }) => {
    const head = { user: "You", tool: "Result" }[role] ?? (model ? `Answer of ${model}` : "Answer");
    const thoughts = reasoning ? `> ${reasoning.trim().replaceAll("\n", "\n> ")}\n\n` : "";
    const called = (calls ?? []).map(({ name, arguments: text }) => `\n\n\`\`\`json\n${name}(${text})\n\`\`\``).join("");
    return `## ${head}\n\n${thoughts}${content}${called}${error ? `\n\n*${error}*` : ""}\n`;
  });
  return `# ${title(conversation)}\n\n${parts.join("\n")}`;
}
