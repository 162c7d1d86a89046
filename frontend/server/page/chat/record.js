// Conversations as files and the browser's store have them: checked, since a stranger, an older version of this page or a
// fault may have written them. Pure: no IO, no DOM.

const MESSAGES = 10_000; // of a conversation
const CONVERSATIONS = 10_000; // of a file
const TEXT = 4_000_000; // characters of one text
const PICTURE = 64_000_000; // characters of a data: URL
const [PICTURES, CALLS, TOKENS, ALTERNATIVES] = [100, 1000, 1_000_000, 100]; // of a message
export const LARGEST_FILE = 400_000_000; // bytes

/** A record that is no conversation of this page; the message says why. */
export class RecordError extends Error {}

function expect(fits, what) {
  if (!fits) throw new RecordError(what);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value, name, most = TEXT) => {
  expect(typeof value === "string", `${name} is not a text`);
  expect(value.length <= most, `${name} has more than ${most.toLocaleString("en")} characters`);
  return value;
};
const number = (value, name) => (expect(typeof value === "number" && Number.isFinite(value), `${name} is not a number`), value);
const flag = (value, name) => (expect(typeof value === "boolean", `${name} is neither true nor false`), value);
const short = (value, name) => text(value, name, 10_000); // names, which the page itself makes of a few hundred at most
const list = (each, most) => (values, name) => {
  expect(Array.isArray(values), `${name} is not a list`);
  expect(values.length <= most, `${name} has more than ${most.toLocaleString("en")} entries`);
  return Array.from(values, (value, i) => each(value, `${name}[${i}]`));
};

function picture(url, name) {
  const [head] = /^data:image\/(?:png|jpeg|webp|gif);base64,/.exec(text(url, name, PICTURE).slice(0, 40)) ?? [];
  expect(head && !/[^A-Za-z0-9+/=]/.test(url.slice(head.length)), `${name} is no data: URL of a picture`);
  return url;
}

function call(value, name) {
  expect(isObject(value), `${name} is not an object`);
  const id = value.id === undefined || value.id === null ? undefined : short(value.id, `${name}.id`);
  return { id, name: short(value.name, `${name}.name`), arguments: text(value.arguments, `${name}.arguments`) };
}

/** [text, log probability, alternatives, draft], as answer.js keeps them. JSON has null for an infinite number. */
function token(value, name) {
  expect(Array.isArray(value) && value.length === 4, `${name} is not a token`);
  const [written, logprob, others, draft] = value;
  expect(draft === null || typeof draft === "boolean", `${name}[3] is neither true, false nor null`);
  return [...probable([written, logprob], name), list(probable, ALTERNATIVES)(others, `${name}[2]`), draft];
}

function probable(value, name) {
  expect(Array.isArray(value) && value.length === 2, `${name} is not a text with its log probability`);
  const logprob = value[1] === null || value[1] === -Infinity ? -Infinity : number(value[1], `${name}[1]`);
  return [short(value[0], `${name}[0]`), logprob];
}

const OPTIONAL = {
  pictures: list(picture, PICTURES),
  reasoning: text,
  calls: (values, name) => list(call, CALLS)(Array.isArray(values) ? values.filter((value) => value !== null) : values, name),
  call: short,
  tokens: list(token, TOKENS),
  model: short,
  note: short,
  error: text,
  status: number,
  size: number,
  full: flag,
  cut: flag,
  running: flag,
};

/** A message with the fields above only. known: the ids of those before it. */
function message(value, name, known) {
  expect(isObject(value), `${name} is not an object`);
  const { id, parent, role, content } = value;
  short(id, `${name}.id`);
  expect(id !== "" && !known.has(id), `${name}.id is empty, or another message's`);
  expect(known.has(parent), `${name}.parent is no message before it`); // so that no branch is a circle
  expect(["user", "assistant", "tool"].includes(role), `${name}.role is none of user, assistant and tool`);
  known.add(id);
  const made = { id, parent, role, content: text(content, `${name}.content`) };
  for (const [field, check] of Object.entries(OPTIONAL)) {
    if (Object.hasOwn(value, field) && value[field] !== undefined && value[field] !== null) made[field] = check(value[field], `${name}.${field}`);
  }
  return made;
}

/** Milliseconds since 1970 that a date can have. */
const time = (value, name) => (expect(number(value, name) >= 0 && value <= 8.64e15, `${name} is no time`), value);

/** The conversation that a record is, with the known fields only. Throws RecordError. */
export function conversation(record) {
  expect(isObject(record), "it is not an object");
  const { id, title = "", changed, messages, leaf, since = null } = record;
  expect(Array.isArray(messages), "messages is not a list");
  expect(messages.length <= MESSAGES, `it has more than ${MESSAGES.toLocaleString("en")} messages`);
  const known = new Set([null]);
  const made = messages.map((value, i) => message(value, `messages[${i}]`, known));
  expect(known.has(leaf) && (leaf !== null || !messages.length), "leaf is none of its messages");
  expect(known.has(since), "since is none of its messages");
  return { id: short(id, "id"), title: short(title, "title"), changed: time(changed, "changed"), messages: made, leaf, since };
}

/** The conversations of a file, each with a new id: {conversations, problems}. problems: of those that are none. */
export function imported(file, created) {
  let records;
  try {
    records = [JSON.parse(file)].flat();
  } catch {
    return { conversations: [], problems: ["it is no JSON"] };
  }
  if (records.length > CONVERSATIONS) return { conversations: [], problems: [`it has more than ${CONVERSATIONS.toLocaleString("en")} conversations`] };
  const [conversations, problems] = [[], []];
  records.forEach((record, i) => {
    const name = records.length > 1 ? `conversation ${i + 1}: ` : "";
    try {
      const { title, messages, leaf, since } = conversation(isObject(record) ? { ...created(), ...record } : record);
      expect(messages.length, "it has no messages");
      conversations.push({ ...created(), title, messages: messages.map((one) => ({ ...one, running: false })), leaf, since });
    } catch (error) {
      problems.push(`${name}${error instanceof RecordError ? error.message : "it cannot be read"}`);
    }
  });
  return { conversations, problems };
}
