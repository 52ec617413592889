/* Images that go with a question: chosen, dropped or pasted. They are drawn on canvases, so that the page's
 * policy need not allow any image from elsewhere. */

import { $, make, number, size } from "./dom.js";

const HEIGHT = 72;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

export class Images {
  constructor() {
    this.limits = null;
    this.chosen = [];
    $("attach").addEventListener("click", () => $("attach-files").click());
    $("attach-files").accept = TYPES.join();
    $("attach-files").addEventListener("change", () => {
      this.add([...$("attach-files").files]);
      $("attach-files").value = "";
    });
    $("input").addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      // A copied piece of a page has text too, and the text is meant then.
      if (!files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.add(files);
    });
    this.#listenToDrops();
  }

  /** limits: `images` of the model's card; undefined where the model does not see images. */
  allow(limits) {
    this.limits = limits ?? null;
    $("attach").hidden = !limits;
    if (!limits) return;
    $("attach").title = `Up to ${number(limits.max_images)} images of at most ${size(limits.max_bytes)} and ${megapixels(limits.max_pixels)} each; or drop or paste them`;
  }

  /** Replaces the images of the next question. */
  put(images) {
    this.chosen = images;
    this.#say("");
    this.#show();
  }

  async add(files) {
    this.#say("");
    if (!this.limits) {
      this.#say("This model does not see images.");
      return;
    }
    for (const file of files) {
      const why = await this.#addOne(file);
      if (why) this.#say(why);
    }
    this.#show();
    $("input").focus();
  }

  /** Returns why the file is not taken, or null. */
  async #addOne(file) {
    const { max_images: most, max_bytes: bytes, max_pixels: pixels } = this.limits;
    const name = file.name || "The image";
    if (!TYPES.includes(file.type)) return `${name} is no PNG, JPEG, WebP, GIF or BMP image.`;
    if (this.chosen.length >= most) return `A request may have ${number(most)} image${most > 1 ? "s" : ""}.`;
    if (file.size > bytes) return `${name} has ${size(file.size)}; this server takes ${size(bytes)}.`;
    let full;
    try {
      full = await createImageBitmap(file);
    } catch {
      return `${name} cannot be read as an image.`;
    }
    const { width, height } = full;
    const small = width * height <= pixels ? await reduced(full) : null;
    full.close();
    if (!small) return `${name} has ${megapixels(width * height)}; this server takes ${megapixels(pixels)}.`;
    this.chosen.push({ name, about: `${width} × ${height}, ${size(file.size)}`, bitmap: small, url: await dataUri(file) });
    return null;
  }

  #say(text) {
    $("attach-error").textContent = text;
    $("attach-error").hidden = !text;
  }

  #show() {
    $("attachments").hidden = !this.chosen.length;
    $("attachments").replaceChildren(...this.chosen.map((image) => make(
      "li", {}, picture(image),
      make("button", {
        type: "button", class: "icon", "aria-label": `Remove ${image.name}`,
        onclick: () => this.put(this.chosen.filter((each) => each !== image)),
      }, "✕"),
    )));
  }

  #listenToDrops() {
    const target = $("chat");
    const over = (event, on) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      // Without this the browser would leave the page for the file.
      event.preventDefault();
      target.classList.toggle("dropping", on && this.limits !== null);
    };
    target.addEventListener("dragover", (event) => over(event, true));
    target.addEventListener("dragleave", (event) => over(event, false));
    target.addEventListener("drop", (event) => {
      over(event, false);
      const files = filesOf(event.dataTransfer);
      if (files.length) this.add(files);
    });
  }
}

/** An image as a canvas, with its name and size for whoever points at it. */
export function picture({ bitmap, name, about }) {
  const canvas = make("canvas", { role: "img", "aria-label": name, title: `${name}, ${about}`, width: bitmap.width, height: bitmap.height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas;
}

const filesOf = (transfer) => [...(transfer?.files ?? [])];

function reduced(bitmap) {
  const scale = Math.min(1, (2 * HEIGHT) / bitmap.height, (8 * HEIGHT) / bitmap.width);
  const [resizeWidth, resizeHeight] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  return createImageBitmap(bitmap, { resizeWidth, resizeHeight, resizeQuality: "high" });
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

const megapixels = (pixels) => `${number(pixels / 1e6, 1)} megapixels`;
