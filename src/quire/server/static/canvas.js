/* Canvases that are sharp on every screen. */

/** Sets a canvas to `width` by `height` CSS pixels and returns a cleared context to draw in. */
export function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The name of a lane's colour. Eight are told apart; more would not be. */
export const laneColour = (lane) => `c${lane % 8}`;

/** Calls `draw` when the element's width has changed. */
export function onResize(element, draw) {
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    draw();
  }).observe(element);
}
