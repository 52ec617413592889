/* Talks to the server that this page came from. Paths are relative, so that a prefix holds. */

const KEY = "quire-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
};

/** An answer other than 200, or none at all (status 0). `param`: the field at fault. */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The response, once its headers are there and say 200. Throws ApiError, or AbortError. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = `The server answered ${response.status}.`;
  let param = null;
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    param = error.param ?? null;
  } catch {
    // Not the server's own words: a proxy's page, say.
  }
  const after = response.headers.get("Retry-After");
  if (after !== null && !message.includes(after)) message += ` Try again in ${after} s.`;
  return new ApiError(response.status, message, param);
}

/** The data of a stream of server-sent events, parsed; ends with the stream or at [DONE]. An error
 * that comes as an event is thrown. */
export async function* events(response) {
  for await (const { name, data } of lines(response)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) {
      throw new ApiError(0, value.error.message ?? "The stream broke off.", value.error.param);
    }
    yield { name, value };
  }
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  let data = [];
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection broke off.");
      }
      if (chunk.done) return;
      const parts = (rest + chunk.value).split("\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.endsWith("\r") ? part.slice(0, -1) : part;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line === "" && data.length) {
          yield { name, data: data.join("\n") };
          name = "message";
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What a failed request means to whoever sent it. */
export function explain(error) {
  if (error.status === 401) {
    return key.get() ? "The server does not accept this API key." : "This server wants an API key.";
  }
  const where = error.param && !error.message.includes(error.param) ? ` (${error.param})` : "";
  return `${error.message}${where}`;
}
