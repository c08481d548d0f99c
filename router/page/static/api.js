// Calls of the router. The key, if one is needed, is in this module's memory and nowhere else.

let key = "";

export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(value) {
  key = value;
}

/** A response that is not an error. Raises ApiError; TypeError if the router cannot be reached. */
export async function call(path, { method = "GET", body = undefined, signal = undefined, headers = {} } = {}) {
  const response = await fetch(path, {
    method,
    signal,
    cache: "no-store",
    credentials: "omit",
    headers: {
      ...(key ? { Authorization: `Bearer ${key}` } : {}),
      ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      ...headers,
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Of a proxy, perhaps: the status has to do.
  }
  throw new ApiError(response.status, detail.message ?? `the router answered ${response.status}`, detail.code ?? "");
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** Server-sent events of a response: { event, data } as they come. EventSource cannot send a key, fetch can. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
          else if (line.startsWith("event:")) event = line.slice(6).trim();
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
