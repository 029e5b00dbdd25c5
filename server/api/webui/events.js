// Yields the data of each event of a stream of bytes. As the standard demands, an event without its empty line is lost.
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder(); // joins characters whose bytes arrive in two pieces
  let rest = "", data = [], endsWithCr = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const text = decoder.decode(value, { stream: true });
      if (!text) continue;
      const lines = (rest + (endsWithCr ? text.replace(/^\n/, "") : text)).split(/\r\n|\r|\n/);
      endsWithCr = text.endsWith("\r"); // which a \n may follow that ends the same line
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
        const [, field, content] = line.match(/^([^:]*)(?:: ?)?(.*)$/s);
        if (field === "data") data.push(content); // others are comments, which keep the connection open
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed
  }
}
