// Speaks HTTP with the server: JSON, errors as the OpenAI API words them, streamed answers (SSE).
// Knows nothing of the page but its language. Paths are relative, so that the page works behind a proxy's prefix too.

import { tr } from "./translate.js";

/** A request that brought no (whole) answer. `status` 0: server not reached, or the connection broke. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code; // the server's word for the reason
    this.retryAfterS = retryAfterS;
  }
}

/** Fetch and throw an ApiError unless the answer is 2xx. An abort passes through as AbortError. */
async function request(path, { apiKey, body, signal } = {}) {
  const headers = {};
  if (apiKey) headers["Authorization"] = `Bearer ${apiKey}`;
  const isForm = body instanceof FormData; // the browser adds its type
  if (body && !isForm) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: isForm ? body : body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    throw asApiError(error, tr("The server cannot be reached. Is it still running?"));
  }
  if (!response.ok) throw await readError(response);
  return response;
}

function lost() {
  return tr("The connection to the server was lost before the answer was complete.");
}

/** fetch reports every failure of the network as a TypeError. */
function asApiError(error, message) {
  return error instanceof TypeError ? new ApiError(message) : error;
}

async function readError(response) {
  const { status, headers } = response;
  const retryAfterS = Number.parseFloat(headers.get("Retry-After")) || null;
  try {
    const { message, code } = (await response.json()).error;
    return new ApiError(message, { status, code, retryAfterS });
  } catch {
    // Not our server's JSON, but some proxy's page.
    return new ApiError(tr("The server answered with status {status}.", { status }), { status, retryAfterS });
  }
}

/** Ask for JSON; with a `body` in the options, by POST. */
export async function askJson(path, options) {
  const response = await request(path, options);
  return response.json();
}

/** Ask for a file, as a Blob. */
export async function askBlob(path, options) {
  const response = await request(path, options);
  return response.blob();
}

/** Yield the chunks of one streamed answer. Leaving the loop early closes the connection. `onBegin(id)` gets the
 *  request's id as soon as the answer begins. */
export async function* streamCompletion(body, { onBegin, ...options }) {
  const response = await request("v1/chat/completions", {
    ...options,
    body: { ...body, stream: true, stream_options: { include_usage: true } },
  });
  onBegin(response.headers.get("x-request-id"));
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { status: 500, code: chunk.error.code });
    yield chunk;
  }
  throw new ApiError(lost());
}

/** Yield the `data` of each event of an SSE body. */
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (buffer + value).split(/\r?\n\r?\n/);
      buffer = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    throw asApiError(error, lost());
  } finally {
    // The body may be broken or aborted already; then there is nothing left to close.
    reader.cancel().catch(() => {});
  }
}
