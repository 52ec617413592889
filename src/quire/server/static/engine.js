export class Engine {
  watch() {}
  reconnect() {}
  redraw() {}
}
