// A client in Java with the classes that protoc makes: stream, cancel, deadline, error details, retries of the
// service config, planes of the page map. Ends with exit code 1 if anything is not as it should be.
//
//   examples/java/run.sh [ADDRESS]

import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.rpc.Details;
import dev.kvatlas.v1.CacheServiceGrpc;
import dev.kvatlas.v1.GenerateRequest;
import dev.kvatlas.v1.GenerationServiceGrpc;
import dev.kvatlas.v1.GenerationSpec;
import dev.kvatlas.v1.GenerationSummary;
import dev.kvatlas.v1.GetPagePoolRequest;
import dev.kvatlas.v1.PoolGeometry;
import dev.kvatlas.v1.SamplingParams;
import dev.kvatlas.v1.SnapshotChunk;
import dev.kvatlas.v1.StopCriteria;
import dev.kvatlas.v1.StreamGenerateRequest;
import dev.kvatlas.v1.StreamGenerateResponse.EventCase;
import dev.kvatlas.v1.StreamGenerateResponse;
import dev.kvatlas.v1.WatchPageMapRequest;
import dev.kvatlas.v1.WatchPageMapResponse;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.NettyServerBuilder;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteOrder;
import java.nio.IntBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

public final class Generate {
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final Metadata.Key<String> PUSHBACK =
      Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final int RESERVED = 5;

  private final GenerationServiceGrpc.GenerationServiceBlockingStub generation;
  private final CacheServiceGrpc.CacheServiceBlockingStub cache;

  private Generate(ManagedChannel channel) {
    generation = withToken(GenerationServiceGrpc.newBlockingStub(channel));
    cache = withToken(CacheServiceGrpc.newBlockingStub(channel));
  }

  public static void main(String[] arguments) throws Exception {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    String config = Files.readString(Path.of(arguments.length > 1 ? arguments[1] : "examples/service_config.json"));
    ManagedChannel channel = channelTo(address, config);
    try {
      Generate client = new Generate(channel);
      client.stream();
      client.cancel();
      client.deadline();
      client.refused();
      client.pages();
      retry(config);
      System.out.println("all as it should be");
    } finally {
      channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
    }
  }

  // One channel, reused. Gson reads numbers as Double, which is what grpc-java wants in a service config.
  @SuppressWarnings("unchecked")
  private static ManagedChannel channelTo(String target, String config) {
    return NettyChannelBuilder.forTarget(target)
        .usePlaintext()
        .defaultServiceConfig(new Gson().fromJson(config, Map.class))
        .enableRetry()
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .build();
  }

  private static <S extends io.grpc.stub.AbstractStub<S>> S withToken(S stub) {
    String token = System.getenv("KVATLAS_TOKEN");
    if (token == null || token.isEmpty()) return stub;
    Metadata headers = new Metadata();
    headers.put(AUTHORIZATION, "Bearer " + token);
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  // The order of a stream: started, deltas without a gap, one end per choice, the summary, status OK.
  private void stream() {
    GenerationSpec spec =
        GenerationSpec.newBuilder()
            .setText("The sky is")
            .setSampling(SamplingParams.newBuilder().setTemperature(0))
            .setStop(StopCriteria.newBuilder().setMaxTokens(12))
            .build();
    List<EventCase> kinds = new ArrayList<>();
    StringBuilder text = new StringBuilder();
    int tokens = 0;
    Iterator<StreamGenerateResponse> answer =
        generation.withDeadlineAfter(60, TimeUnit.SECONDS).streamGenerate(request(spec));
    while (answer.hasNext()) {
      StreamGenerateResponse message = answer.next();
      kinds.add(message.getEventCase());
      if (message.hasDelta()) {
        check(message.getDelta().getTokenOffset() == tokens, "a gap in the stream");
        tokens += message.getDelta().getTokenCount();
        text.append(message.getDelta().getText());
      }
    }
    check(kinds.get(0) == EventCase.STARTED, "the first message is " + kinds.get(0));
    check(
        kinds.subList(kinds.size() - 2, kinds.size())
            .equals(List.of(EventCase.CHOICE_FINISHED, EventCase.SUMMARY)),
        "the stream ends with " + kinds);
    System.out.printf("stream: %d tokens:%s%n", tokens, text.toString().replace('\n', ' '));
  }

  // Leaving the loop is not enough: the context of the call is cancelled, and its pages go back to the pool.
  private void cancel() throws InterruptedException {
    int deltas = 0;
    Status.Code code = Status.Code.OK;
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      Iterator<StreamGenerateResponse> answer =
          context.call(
              () -> generation.withDeadlineAfter(60, TimeUnit.SECONDS).streamGenerate(request(endless("Count: 1, 2, 3,"))));
      while (answer.hasNext()) {
        if (answer.next().hasDelta() && ++deltas == 5) context.cancel(null);
      }
    } catch (StatusRuntimeException error) {
      code = error.getStatus().getCode();
    } catch (Exception error) {
      throw new AssertionError(error);
    }
    check(code == Status.Code.CANCELLED, "the cancelled stream ended with " + code);
    long limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(10);
    long active;
    do {
      active = looking().getPagePool(GetPagePoolRequest.getDefaultInstance()).getStats().getActivePages();
      Thread.sleep(20);
    } while (active > 0 && System.nanoTime() < limit);
    check(active == 0, active + " pages in use after a cancel");
    System.out.printf("cancel: after %d deltas, no page in use%n", deltas);
  }

  // A deadline ends the call wherever it is.
  private void deadline() {
    try {
      Iterator<StreamGenerateResponse> answer =
          generation
              .withDeadlineAfter(200, TimeUnit.MILLISECONDS)
              .streamGenerate(request(endless("Once upon a time")));
      while (answer.hasNext()) answer.next();
      throw new AssertionError("the stream ended by itself");
    } catch (StatusRuntimeException error) {
      check(error.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED, "ended with " + error.getStatus());
    }
    System.out.println("deadline: DEADLINE_EXCEEDED after 200 ms");
  }

  // Reason and violations are in the trailer, as google.rpc.Status.
  private void refused() throws IOException {
    GenerationSpec spec =
        GenerationSpec.newBuilder()
            .setText("x")
            .setSampling(SamplingParams.newBuilder().setTemperature(9).setTopP(7))
            .build();
    try {
      generation
          .withDeadlineAfter(10, TimeUnit.SECONDS)
          .generate(GenerateRequest.newBuilder().setSpec(spec).build());
      throw new AssertionError("the call did not fail");
    } catch (StatusRuntimeException error) {
      check(error.getStatus().getCode() == Status.Code.INVALID_ARGUMENT, "refused with " + error.getStatus());
      String reason = "";
      TreeSet<String> fields = new TreeSet<>();
      for (Any detail : Details.Status.parseFrom(error.getTrailers().get(DETAILS)).getDetailsList()) {
        if (detail.is(Details.ErrorInfo.class)) reason = detail.unpack(Details.ErrorInfo.class).getReason();
        if (detail.is(Details.BadRequest.class))
          detail.unpack(Details.BadRequest.class).getFieldViolationsList().forEach(each -> fields.add(each.getField()));
      }
      check(reason.equals("INVALID_FIELD"), "the reason is " + reason);
      check(fields.equals(new TreeSet<>(List.of("spec.sampling.temperature", "spec.sampling.top_p"))), "at " + fields);
      System.out.printf("refused: %s at %s%n", reason, String.join(", ", fields));
    }
  }

  // Planes are arrays without a header, little endian.
  private void pages() {
    WatchPageMapRequest request =
        WatchPageMapRequest.newBuilder().addPlanes("states").addPlanes("used_ms").build();
    int count = 0, reserved = 0;
    PoolGeometry geometry = null;
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      Iterator<WatchPageMapResponse> feed = context.call(() -> looking().watchPageMap(request));
      boolean isWhole = false;
      while (!isWhole && feed.hasNext()) {
        SnapshotChunk part = feed.next().getSnapshot();
        if (geometry == null) geometry = part.getGeometry();
        IntBuffer used = part.getPages().getUsedMs().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asIntBuffer();
        check(used.remaining() == part.getPageCount(), "a plane of another length");
        for (byte state : part.getPages().getStates().toByteArray()) reserved += state == RESERVED ? 1 : 0;
        count += part.getPageCount();
        isWhole = part.getChunksLeft() == 0;
      }
      context.cancel(null);
    } catch (Exception error) {
      throw new AssertionError(error);
    }
    check(geometry != null && geometry.getPageCount() == count, count + " pages");
    check(reserved == 1, reserved + " reserved pages");
    System.out.printf("pages: %d of %d tokens each%n", count, geometry.getPageSize());
  }

  // Until a server has taken a call, gRPC sends it again by itself, as service_config.json says. Seen at a
  // server of our own that is not ready twice, and says when to come back.
  private static void retry(String config) throws Exception {
    AtomicInteger attempts = new AtomicInteger();
    GenerationServiceGrpc.GenerationServiceImplBase unready =
        new GenerationServiceGrpc.GenerationServiceImplBase() {
          @Override
          public void streamGenerate(
              StreamGenerateRequest request, StreamObserver<StreamGenerateResponse> observer) {
            if (attempts.incrementAndGet() < 3) {
              Metadata trailers = new Metadata();
              trailers.put(PUSHBACK, "20");
              observer.onError(Status.UNAVAILABLE.withDescription("loading").asRuntimeException(trailers));
              return;
            }
            observer.onNext(
                StreamGenerateResponse.newBuilder()
                    .setSummary(GenerationSummary.getDefaultInstance())
                    .build());
            observer.onCompleted();
          }
        };
    Server server =
        NettyServerBuilder.forAddress(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0))
            .addService(unready)
            .build()
            .start();
    ManagedChannel channel = channelTo("127.0.0.1:" + server.getPort(), config);
    try {
      Iterator<StreamGenerateResponse> answer =
          GenerationServiceGrpc.newBlockingStub(channel)
              .withDeadlineAfter(10, TimeUnit.SECONDS)
              .streamGenerate(request(endless("x")));
      check(answer.next().hasSummary() && !answer.hasNext(), "not the summary alone");
      check(attempts.get() == 3, attempts + " attempts");
    } finally {
      channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
      server.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
    }
    System.out.printf("retry: taken at attempt %d%n", attempts.get());
  }

  private CacheServiceGrpc.CacheServiceBlockingStub looking() {
    return cache.withDeadlineAfter(10, TimeUnit.SECONDS);
  }

  private static GenerationSpec endless(String text) {
    StopCriteria stop = StopCriteria.newBuilder().setMaxTokens(1000).setIgnoreEos(true).build();
    return GenerationSpec.newBuilder().setText(text).setStop(stop).build();
  }

  private static StreamGenerateRequest request(GenerationSpec spec) {
    return StreamGenerateRequest.newBuilder().setSpec(spec).build();
  }

  private static void check(boolean isTrue, String otherwise) {
    if (!isTrue) throw new AssertionError(otherwise);
  }
}
