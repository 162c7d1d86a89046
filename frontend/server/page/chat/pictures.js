// Pictures of the next question: by file, drop and paste, shown small until they are sent.

import { $, button, make, named, notify } from "../dom.js";
import { selected } from "../settings/models.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // as docs/media.md says
const LARGEST = 2048; // pixels of a side: larger pictures are made smaller, since models see no more
const MOST = 10;
let urls = [];

const sees = () => selected()?.takes.includes("image") ?? false;

/** Take the pictures for a question: their data: URLs. */
export function take() {
  const taken = urls;
  urls = [];
  show();
  return taken;
}

/** Show what fits the selected model. */
export function show() {
  $("attach").hidden = !sees();
  $("attached").hidden = urls.length === 0;
  const remove = (at) => () => ((urls = urls.filter((_, i) => i !== at)), show());
  $("attached").replaceChildren(
    ...urls.map((src, i) => make("li", {}, make("img", { src, alt: `Picture ${i + 1}` }), button("close", `Remove picture ${i + 1}`, remove(i)))),
  );
}

/** Connect the events. target: where files may be dropped. */
export function open(target) {
  $("attach").onclick = () => $("files").click();
  $("files").onchange = async () => {
    await attach($("files").files);
    $("files").value = "";
  };
  target.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length) (event.preventDefault(), attach(files));
  });
  target.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    target.classList.add("dropping");
  });
  for (const name of ["dragleave", "drop"]) target.addEventListener(name, () => target.classList.remove("dropping"));
  target.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}

async function attach(files) {
  if (!sees()) return notify(`${named(selected()?.name ?? "The model")} takes no pictures.`);
  for (const file of files) {
    if (urls.length === MOST) return notify(`A question may have ${MOST} pictures.`);
    if (!TYPES.includes(file.type)) notify(`${named(file.name)}: pictures are PNG, JPEG, WebP or GIF.`);
    else urls.push(await dataUrl(file).catch(() => notify(`${named(file.name)} cannot be read as a picture.`)));
  }
  urls = urls.filter(Boolean);
  show();
}

async function dataUrl(file) {
  const picture = await createImageBitmap(file);
  const scale = LARGEST / Math.max(picture.width, picture.height);
  if (scale >= 1) return read(file);
  const canvas = make("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
